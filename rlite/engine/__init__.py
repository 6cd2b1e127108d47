"""Engines: driver-side handles of sharded models."""
