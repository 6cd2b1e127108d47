"""A mock GPU: the CUDA build of torch on a machine without a GPU. docs/gpu_rehearsal.md explains it."""
