"""Lost groups: why they were dropped, and how many since the last batch.

Failures that choose among answers. Pure: decides from counts what deserves an alarm.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from rlite.errors import shortened
from rlite.observability import stats_tracker
from rlite.rollout.collector.group import Group, response_lengths
from rlite.runtime.event_loop import ABANDONED
from rlite.runtime.sandbox.calls import SandboxError
from rlite.runtime.sandbox.child import text_of

MAX_FAILED = 0.1
"""share of the attempts at an episode that may fail without an alarm"""
MAX_REDRAWN = 0.05
"""share of the groups that may have other answers than those drawn first"""
MAX_SHIFT = 0.02
"""relative change of the mean length, by missing answers, that is no alarm"""
MIN_ANSWERS = 2
"""failed answers from which their lengths are compared"""


@dataclass
class Selection:
    """Effect of failures on a sample of answers."""

    num_groups: int = 0
    num_attempts: int = 0
    """attempts at an episode"""
    failed_attempts: Counter[str] = field(default_factory=Counter)
    """attempts that failed, by kind of the failure"""
    redrawn: Counter[str] = field(default_factory=Counter)
    """groups with other answers than those drawn first, by kind of the failure"""
    failed: Counter[int] = field(default_factory=Counter)
    """answers of episodes that have failed for good, by their number of tokens"""
    kept: Counter[int] = field(default_factory=Counter)
    """other answers, by their number of tokens"""

    def add(self, other: Selection) -> None:
        """Add the counts of another sample."""
        vars(self).update({name: count + vars(other)[name] for name, count in vars(self).items()})

    def counts(self) -> dict[str, int]:
        """Return metrics that count."""
        found: dict[str, int] = {}
        for name, kinds in (("failed_attempts", self.failed_attempts), ("redrawn", self.redrawn)):
            found |= {f"num_{name}": kinds.total(), **{f"{name}/{kind}": count for kind, count in kinds.items()}}
        return found

    def lengths(self) -> dict[str, float]:
        """Return mean lengths as metrics, if an episode has failed."""
        return {"length_failed": mean_length(self.failed), "length_kept": mean_length(self.kept)} if self.failed else {}

    def alarms(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield a cause, without numbers, and the facts of each alarm."""
        again = "after failures, answers were drawn again, which favours answers that do not fail"
        for cause, kinds, num, limit in (
            ("many attempts at an episode fail", self.failed_attempts, self.num_attempts, MAX_FAILED),
            (again, self.redrawn, self.num_groups, MAX_REDRAWN),
        ):
            if kinds.total() > limit * num:
                counts = {kind: f"{count} x" for kind, count in kinds.most_common()}
                yield cause, {"share": f"{kinds.total()} of {num} (limit {limit:.0%})", **counts}
        mean, kept = mean_length(self.failed + self.kept), mean_length(self.kept)
        if self.failed.total() >= MIN_ANSWERS and self.kept and abs(mean - kept) > MAX_SHIFT * mean:
            than = "longer" if mean > kept else "shorter"
            sides = {"failed": self.failed, "others": self.kept}
            facts = {name: f"{own.total()}, mean length {mean_length(own):.4g} tokens" for name, own in sides.items()}
            yield f"answers that fail are {than} than others, and their loss changes the mean length", facts


def mean_length(lengths: Counter[int]) -> float:
    """Return the mean of lengths, each with its number of answers; 0 without an answer."""
    return sum(length * count for length, count in lengths.items()) / max(1, lengths.total())


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
