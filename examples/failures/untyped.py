"""A tool for docs/known-failures.md whose parameter has no type, so that its schema cannot be made."""

from rlite.rollout import ToolUseWorkflow


def add(a, b):
    """Add two numbers."""
    return a + b


def rewarded(prompt, completions, **row):
    return float("5" in completions)


def untyped(gconfig, tokenizer):
    return ToolUseWorkflow([add], rewarded, gconfig, tokenizer)
