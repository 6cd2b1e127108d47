"""Processes and bytes: clusters, parallelism, sandboxes, files. No algorithm is known here."""
