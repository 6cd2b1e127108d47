"""torch.distributed mechanics inside a worker."""
