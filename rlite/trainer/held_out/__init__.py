"""Held-out sets: their options, and the sets that a trainer evaluates on."""
