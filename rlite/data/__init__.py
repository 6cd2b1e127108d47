"""Data: tables, chats and texts to token rows, loading, packing and balancing."""
