"""Why groups are lost: texts, and the kinds under which they are counted."""

from __future__ import annotations

from rlite.sandbox.child import text_of

TOO_OLD = "too old"
"""of groups that max_head_offpolicyness forbids to train on"""
NOT_ACCEPTED = "not accepted by should_accept"
CANCELLED = "cancelled"
STOPPED = "the run was stopped"
MAX_REASON = 900
"""characters of an error's text; the error itself is the cause of what is raised"""


def reason_of(error: BaseException) -> str:
    """Why a group is lost."""
    text = text_of(error)
    if len(text) > MAX_REASON:  # a traceback names the exception at its end
        text = f"{text[: MAX_REASON // 3]} ... {text[-2 * MAX_REASON // 3 :]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def kind_of(reason: str) -> str:
    """Return the kind of a reason for a loss, as a part of a metric's name: the exception, or what happened."""
    return reason.partition(":")[0].replace(" ", "_")


def in_a_line(reason: str) -> str:
    """Return a reason for a loss without the traceback in it: the kind, and the line that says why."""
    lines = reason.strip().splitlines() or [""]
    return lines[0] if len(lines) == 1 else f"{kind_of(reason)}: {lines[-1].strip()}"
