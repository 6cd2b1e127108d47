"""The newcomer's first run: a task, a teacher and a tiny model."""
