"""The modules to train, their optimizers, and the reference model."""
