"""The command `rlite doctor`: it reports what a machine has and what is missing, and tries rlite on the machine."""
