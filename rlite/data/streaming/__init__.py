"""Tables that do not fit in memory: read in windows, shuffled in a buffer, resumed exactly."""
