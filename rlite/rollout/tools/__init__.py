"""Tools that a model calls: formats of calls, the tools, and the workflow."""
