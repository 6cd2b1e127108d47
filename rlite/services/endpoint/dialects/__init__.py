"""Dialects of the endpoint: a file for each interface that clients speak. `table.DIALECTS` lists them by route."""
