"""Parts of the reinforcement-learning trainer."""
