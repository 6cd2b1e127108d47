"""Hugging Face models that compute packs: attention, linear layers, heads, adapters and kernels, for every backend."""
