"""The train executor "fsdp2": a user's module, sharded with PyTorch's FSDP2 and tensor and context parallelism."""
