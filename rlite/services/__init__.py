"""Services that watch, keep, show or restart a step: records, consoles, checkpoints, recovery, agents' endpoint."""
