"""Lost groups: why they were dropped, which losses stop a run, and what failures do to the answers that are left.

Pure: decides from counts what stops a run, and what deserves an alarm.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlite.errors import CallTimeout, DivergedError, EngineAborted, ResidencyError, RolloutError, WorkerError, shortened
from rlite.observability.stats_tracker import by_kind
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.episode import Episode
from rlite.rollout.failures import RewardCrash, RewardMemory, RewardTimeout
from rlite.runtime.sandbox.calls import SandboxError
from rlite.runtime.sandbox.child import text_of
from rlite.types import Status

ENGINE_FAILURES = (WorkerError, ResidencyError, DivergedError)
"""errors of the engine, which a workflow cannot fix"""
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
        return by_kind("failed_attempts", self.failed_attempts) | by_kind("redrawn", self.redrawn)

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


@dataclass(frozen=True)
class Loss:
    """Why a group is lost."""

    status: Status
    reason: str
    """in words"""
    kind: str
    """part of a metric's name: the name of an exception, or an event"""
    error: BaseException | None = None
    """the exception behind the loss"""

    @classmethod
    def by(cls, error: BaseException) -> Loss:
        """Return the loss of a group by an exception."""
        if isinstance(error, (*ENGINE_FAILURES, EngineAborted)):
            status: Status = "aborted"
        elif isinstance(error, RewardTimeout | RewardCrash | RewardMemory):
            status = "reward_killed"
        else:
            status = "timed_out" if isinstance(error, CallTimeout) else "failed"
        return cls(status, reason_of(error), type(error).__name__, error)


def _event(status: Status, reason: str) -> Loss:
    return Loss(status, reason, reason.replace(" ", "_"))


TOO_OLD = _event("too_old", "too old")
"""the group exceeds max_head_offpolicyness"""
NOT_ACCEPTED = _event("refused", "not accepted by should_accept")
RETURNED_NONE = _event("refused", "the workflow returned None")
CANCELLED = _event("aborted", "cancelled")
STOPPED = _event("aborted", "the run was stopped")


def held_up(seconds: float) -> Loss:
    """Return the loss of a group for which a batch has waited too long."""
    return replace(TOO_OLD, reason=f"{TOO_OLD.reason}: it held up a batch for {seconds:g} s")


def unlike_others(keys: Iterable[str]) -> Loss:
    """Return the loss of a group whose keys, or their types, differ from those of the other groups of its batch."""
    return _event("refused", f"unlike the others of its batch in {', '.join(sorted(keys))}")


MAX_REASON = 900
"""characters of an error's text in a reason; the error itself is the cause of the exception that callers get"""


def reason_of(error: BaseException) -> str:
    """Return the reason for which a group is dropped after this error."""
    text = text_of(error)
    if len(text) > MAX_REASON:  # a traceback names the exception at its end
        text = f"{text[: MAX_REASON // 3]} ... {text[-2 * MAX_REASON // 3 :]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def kind_of(reason: str) -> str:
    """Return the kind of a saved reason, see `Loss`."""
    return reason.partition(":")[0].replace(" ", "_")


def cause_of(reason: str) -> str:
    """Return the key for reporting once: a reason's kind, and for an exception in the user's code its name."""
    kind = kind_of(reason)
    raised = re.match(r"[^\n]* raised (?!.* raised )[^:\n]*", reason) if kind.endswith("Raised") else None
    return raised[0] if raised else kind


def in_full(loss: Loss, item: Mapping[str, Any]) -> str:
    """Return a reason with the traceback in the user's code, what is noted with the error, and the row."""
    if (error := loss.error) is None:
        return loss.reason
    said = f"{loss.kind}: {text_of(error)}" if isinstance(error, SandboxError) else in_a_line(loss.reason)
    row = ", ".join(f"{key}: {shortened(value)}" for key, value in item.items())
    return "\n".join([said.rstrip(), *getattr(error, "__notes__", ()), f"row: {row}"])


def in_a_line(reason: str) -> str:
    """Return a reason without the traceback in it: the kind, and the line with the cause."""
    lines = reason.strip().splitlines() or [""]
    return lines[0] if len(lines) == 1 else f"{kind_of(reason)}: {lines[-1].strip()}"


@dataclass
class Losses:
    """Groups to train on that were lost since the last batch."""

    kinds: Counter[str] = field(default_factory=Counter)
    """groups by kind of the loss"""
    too_old: list[Sequence[Episode]] = field(default_factory=list)
    """episodes of the groups that were too old; a cancelled one may still get a few more tokens"""
    failed: Counter[int] = field(default_factory=Counter)
    """answers of episodes that have failed for good, by their number of tokens"""

    def add(self, loss: Loss, episodes: Sequence[Episode]) -> None:
        """Count a lost group."""
        self.kinds[loss.kind] += 1
        # an episode without a token has no answer
        self.failed.update(each.num_tokens for each in episodes if each.failure and each.num_tokens)
        if loss.status == "too_old":
            self.too_old.append(episodes)

    def metrics(self, kept: Counter[int]) -> dict[str, float]:
        """Return mean lengths of what was lost, beside those of the answers that are left."""
        found = Selection(failed=self.failed, kept=kept).lengths()
        if self.too_old:
            lengths = Counter(episode.num_tokens for episodes in self.too_old for episode in episodes)
            found |= {"length_dropped": mean_length(lengths), "length_kept": mean_length(kept)}
        return found


class FailureStreaks:
    """Counts how many groups in a row have failed, in the order of their start.

    The order of their end is not suitable. If one row in twenty fails at once, the first groups of a large batch to end
    are all failures.
    """

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        """length of each streak, at the positions of its first and of its last group"""

    def add(self, position: int) -> int:
        """Return the length of a failed group's streak. The group was the `position`-th to start."""
        before, after = self._lengths.pop(position - 1, 0), self._lengths.pop(position + 1, 0)
        length = before + 1 + after
        self._lengths[position - before] = self._lengths[position + after] = length
        return length


class StopRule:
    """Decides which loss of a group stops the run: of too many groups in a row, or of one whose loss is final."""

    def __init__(self, options: CollectorOptions) -> None:
        self._options = options
        self._failures = FailureStreaks()
        self.num_refused = 0
        """groups in a row whose episodes succeeded, and that were refused"""

    def error(self, loss: Loss, item: Mapping[str, Any], start_order: int | None) -> RolloutError | None:
        """Return the error that stops the run, or None.

        `start_order`: the group's number in the order of their starts; None if it is not trained on.
        """
        if start_order is None:
            return None
        if loss.status == "refused":
            is_counted = loss != NOT_ACCEPTED or not self._options.is_filter_bounded
            self.num_refused = self.num_refused + 1 if is_counted else 0
            if self.num_refused >= self._options.max_consecutive_rejections:
                return stopped(f"{self.num_refused} groups in a row were dropped: {loss.reason}")
        elif (num_failures := self._failures.add(start_order)) >= self._options.max_consecutive_failures:
            last = in_full(loss, item)
            return stopped(f"{num_failures} groups in a row failed, the last with {last}", loss.error)
        return None


def stopped(why: str, cause: BaseException | None = None) -> RolloutError:
    """Return the error that callers get when the run was stopped."""
    error = RolloutError(f"the rollouts were stopped: {why}")
    error.__cause__ = cause
    return error
