"""The command `rlite eval`: samples of checkpoints, their metrics, and their difference."""
