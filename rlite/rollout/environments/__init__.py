"""Run environments in processes of their own: files with `step`, and Gym-like classes."""
