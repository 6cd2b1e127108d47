"""The only place that knows all zones: commands and the quickstart."""
