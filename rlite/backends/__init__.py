"""Backends that run a step on some hardware: executors of train and inference engines, and their replicas."""
