"""Conversations and raw texts as tokens: chat templates, masks of turns, special tokens in content."""
