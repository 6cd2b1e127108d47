"""Copies of a model on their devices: engines as sets of workers, replicas that serve, and weights between them."""
