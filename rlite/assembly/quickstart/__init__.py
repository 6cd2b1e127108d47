"""The quickstart: a task, a teacher and a tiny model."""
