"""The inference executor "torch": continuous batching around a Hugging Face model."""
