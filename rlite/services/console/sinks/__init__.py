"""Sinks: places that keep a run's metrics."""
