"""Conversations of several turns as exact token histories."""
