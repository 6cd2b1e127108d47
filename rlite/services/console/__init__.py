"""The console of a run, its plots, and the sinks that keep its metrics."""
