"""Trainers: each a readable loop, each runnable as `python -m rlite.trainer.NAME key=value`."""
