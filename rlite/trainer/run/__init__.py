"""The life of a run: folder, checkpoints, resume, alarms, signals, throughput."""
