"""What watches, keeps, shows or restarts a step: records, consoles, checkpoints, recovery."""
