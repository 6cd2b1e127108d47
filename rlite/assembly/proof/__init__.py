"""Proof of a run: its steps made again from the record, and its results computed again."""
