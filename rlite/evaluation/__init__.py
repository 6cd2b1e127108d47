"""Evaluation: samples of a model, and the metrics computed from them."""
