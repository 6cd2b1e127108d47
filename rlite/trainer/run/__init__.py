"""The life of a run: folder, checkpoints, resume, divergence, signals, throughput."""
