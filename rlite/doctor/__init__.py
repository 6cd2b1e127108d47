"""The command `rlite doctor`: it says what a machine has and what is missing, and tries rlite on it."""
