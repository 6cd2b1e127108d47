"""Checkpoints: sharded ones to resume from, Hugging Face folders to use elsewhere."""
