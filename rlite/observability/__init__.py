"""Observation of a run: `stats_tracker` collects, `sinks` keep, `console` shows, `plots` draws. Import the modules."""
