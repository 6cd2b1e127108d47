"""Make the record of a run from its rollouts."""
