"""Faults on purpose: what can go wrong with a run, in words, and the code that makes it happen."""
