"""Lost groups: why they were dropped, and how many since the last batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from rlite.errors import shortened
from rlite.observability import stats_tracker
from rlite.rollout.collector.group import Group, response_lengths
from rlite.rollout.collector.selection import Selection, mean_length
from rlite.rollout.deadlines import ABANDONED
from rlite.sandbox.child import text_of
from rlite.sandbox.errors import SandboxError

TOO_OLD = "too old"
"""the group exceeds max_head_offpolicyness"""
NOT_ACCEPTED = "not accepted by should_accept"
RETURNED_NONE = "the workflow returned None"
CANCELLED = "cancelled"
STOPPED = "the run was stopped"
MAX_REASON = 900
"""characters of an error's text in a reason; the error itself is the cause of the exception that callers get"""


def reason_of(error: BaseException) -> str:
    """Return the reason for which a group is dropped after this error."""
    text = text_of(error)
    if len(text) > MAX_REASON:  # a traceback names the exception at its end
        text = f"{text[: MAX_REASON // 3]} ... {text[-2 * MAX_REASON // 3 :]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def kind_of(reason: str) -> str:
    """Return a reason's kind, as part of a metric's name: the exception's name, or what happened."""
    return reason.partition(":")[0].replace(" ", "_")


def cause_of(reason: str) -> str:
    """Return the key for reporting once: a reason's kind, and for an exception in the user's code its name."""
    kind = kind_of(reason)
    raised = re.match(r"[^\n]* raised (?!.* raised )[^:\n]*", reason) if kind.endswith("Raised") else None
    return raised[0] if raised else kind


def in_full(reason: str, error: BaseException | None, item: Mapping[str, Any]) -> str:
    """Return a reason with the traceback in the user's code, what is noted with the error, and the row.

    Args:
        reason: why a group was lost.
        error: the exception behind the reason.
        item: the group's row.
    """
    if error is None:
        return reason
    said = f"{kind_of(reason)}: {text_of(error)}" if isinstance(error, SandboxError) else in_a_line(reason)
    row = ", ".join(f"{key}: {shortened(value)}" for key, value in item.items())
    return "\n".join([said.rstrip(), *getattr(error, "__notes__", ()), f"row: {row}"])


def in_a_line(reason: str) -> str:
    """Return a reason without the traceback in it: the kind, and the line with the cause."""
    lines = reason.strip().splitlines() or [""]
    return lines[0] if len(lines) == 1 else f"{kind_of(reason)}: {lines[-1].strip()}"


class LostGroups:
    """Counts the groups to train on that were lost since the last batch.

    Args:
        failed_attempts: attempts at an episode that have failed before, by kind.
    """

    def __init__(self, failed_attempts: Counter[str] | None = None) -> None:
        self.first: dict[str, str] = {}
        """reason of the first lost group of each cause, with its row"""
        self._lost: Counter[str] = Counter()
        self._failed_attempts = Counter(failed_attempts or ())
        self._too_old: list[Counter[int]] = []
        self._failed_lengths = Counter[int]()
        """answers of episodes that have failed for good, by their number of tokens"""
        self.selection = Selection()
        """effect of failures on the answers since the alarms were given"""

    def explain(self, group: Group, reason: str, error: BaseException | None) -> None:
        """Keep the reason of a lost group, also of an evaluation, if it is the first of its cause.

        Args:
            group: lost.
            reason: why.
            error: the exception behind the reason.
        """
        if (cause := cause_of(reason)) not in self.first:
            self.first[cause] = in_full(reason, error, group.data)

    def add(self, group: Group, reason: str) -> None:
        """Count a lost group."""
        self._lost[kind_of(reason)] += 1
        failed = [group.tokens[place] for place, each in enumerate(group.episodes) if each.failure]
        self._failed_lengths.update(filter(None, failed))  # an episode without a token has no answer
        if reason.startswith(TOO_OLD):
            self._too_old.append(group.tokens)  # a cancelled group may still report a few more

    def report(self, batch: TensorDict, groups: Sequence[Group], version: int, failed_attempts: Counter[str]) -> None:
        """Record statistics of a batch and of the groups that were lost before it, then start again from zero.

        Args:
            batch: about to be consumed.
            groups: groups in the batch.
            version: current policy version.
            failed_attempts: attempts at an episode that have failed so far, by kind.
        """
        failed = failed_attempts - self._failed_attempts
        found = Selection(
            num_groups=len(groups),
            num_attempts=failed.total() + sum(group.size for group in groups),
            failed_attempts=failed,
            redrawn=Counter(group.redrawn for group in groups if group.redrawn),
            failed=self._failed_lengths,
            kept=Counter(response_lengths([batch])),
        )
        self.selection.add(found)
        num_refused = self._lost.pop(kind_of(NOT_ACCEPTED), 0)  # should_accept is there to refuse groups
        with stats_tracker.scope("rollout"):
            stats_tracker.count(num_groups=len(groups), num_lost=self._lost.total(), num_refused=num_refused)
            stats_tracker.count(**found.counts(), **{f"lost/{kind}": n for kind, n in self._lost.items()})
            stats_tracker.scalar(num_abandoned=len(ABANDONED), **found.lengths())
            if "versions" in batch:
                # a sequence is as old as its oldest token
                made = batch["versions"].masked_fill(batch["versions"] < 0, torch.iinfo(torch.int64).max).amin(1)
                stats_tracker.scalar(staleness=(version - made.clamp(max=version)).double().mean())
            if self._too_old:
                lengths = Counter(tokens for group in self._too_old for tokens in group.values())
                stats_tracker.count(num_dropped_too_old=len(self._too_old))
                stats_tracker.scalar(length_dropped=mean_length(lengths), length_kept=mean_length(found.kept))
        self._lost, self._failed_attempts = Counter(), failed_attempts
        self._too_old, self._failed_lengths = [], Counter()
