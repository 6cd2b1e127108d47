"""Formats of datasets, recognised by their rows, and their conversion to the form that rlite reads."""
