"""Environments: files with `step` or Gym-like classes, run in processes of their own."""
