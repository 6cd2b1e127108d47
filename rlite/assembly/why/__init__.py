"""The mismatch microscope: why the log-probabilities of a run's engine and trainer disagree."""
