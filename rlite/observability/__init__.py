"""What a run reports: `stats_tracker` collects, `sinks` keep, `console` shows, `plots` draws. Import the modules."""
