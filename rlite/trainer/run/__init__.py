"""The life of a run: start, objects of the program, folder, checkpoints, resume, divergence, signals, throughput."""
