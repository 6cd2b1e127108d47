"""The command `rlite doctor`: what a machine has, what is missing, and whether rlite works on it."""
