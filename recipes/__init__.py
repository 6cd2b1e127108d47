"""Known tasks with data preparation and one launch script each; `python -m recipes.NAME.prepare`."""
