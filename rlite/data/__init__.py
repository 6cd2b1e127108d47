"""Data: prompts, packing and balancing."""
