"""Backends that run a step on some hardware: the executors of train and inference engines."""
