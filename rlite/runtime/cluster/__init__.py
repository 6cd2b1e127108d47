"""Worker processes: placement on devices, groups of workers, and the launchers that start them."""
