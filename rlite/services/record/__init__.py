"""The record of a run: what happened to every rollout."""
