"""The inference executor "torch": continuous batching around an unmodified Hugging Face model."""
