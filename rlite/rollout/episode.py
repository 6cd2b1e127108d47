"""One episode as a record shows it: how far it came, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from tensordict import TensorDict

from rlite.rollout.record.attempt import AttemptHistory
from rlite.rollout.trajectories import from_columns

Span = tuple[str, float, float]
"""name, start and end, in seconds after the group's submission"""
PLAIN = ("started", "ended", "ended_at", "failure", "redrawn", "answer")
"""attributes of an episode that are saved as they are"""


class Episode:
    """One episode of a group, over all of its attempts.

    Times are seconds by `time.monotonic` after the submission of the group. Spans may overlap.

    Args:
        submitted: `time.monotonic()` at the submission.
    """

    def __init__(self, submitted: float) -> None:
        self._submitted = submitted
        self.started: float | None = None
        self.ended: float | None = None
        self.ended_at: float | None = None
        """Unix time of the end"""
        self.spans: list[Span] = []
        """waits for the engine (`generate`) and for rewards (`reward`)"""
        self.trajectory: TensorDict | None = None
        """checked, as soon as the episode has succeeded"""
        self.attempt = AttemptHistory()
        """tokens of the last attempt; empty as soon as there is a trajectory"""
        self.failure = ""
        """error of the last attempt, if no attempt was left"""
        self.failed_attempts: list[str] = []
        """kinds of the errors of the attempts that failed, in order"""
        self.redrawn = ""
        """kind of the failure after which the episode drew other answers than before; empty if it did not"""
        self.answer: str | None = None
        """answer that the reward of the current attempt has named"""
        self._answered_by: object = None

    def begin(self) -> None:
        """Begin the first attempt."""
        self.started = self.now()

    def begin_attempt(self) -> None:
        """Forget what an earlier attempt has written and answered."""
        self.attempt = AttemptHistory()
        self.answer = self._answered_by = None

    def take_trajectory(self, trajectory: TensorDict | None) -> None:
        """Keep what the workflow has returned.

        Args:
            trajectory: checked; None if the workflow refuses the group.
        """
        self.trajectory = trajectory
        if trajectory is not None:
            self.attempt = AttemptHistory()

    def take_answer(self, reward: object, answer: str | None) -> None:
        """Keep the answer that a reward has named. Without one, the former answer of the same reward is removed.

        Args:
            reward: the function that has judged the episode.
            answer: None if the reward names no answer.
        """
        if answer is not None or self._answered_by is reward:
            self.answer, self._answered_by = answer, reward

    def end(self) -> None:
        """End the last attempt."""
        self.ended, self.ended_at = self.now(), time.time()

    def span(self, name: str) -> _OpenSpan:
        """Return a context that records the time of its block.

        Args:
            name: generate or reward.
        """
        return _OpenSpan(self, name)

    def seconds(self, *names: str) -> float:
        """Return the time in which spans of these names were open; overlapping spans count once."""
        total = end = 0.0
        for _, began, ended in sorted(
            (span for span in list(self.spans) if span[0] in names), key=lambda span: span[1]
        ):
            total += max(0.0, ended - max(began, end))
            end = max(end, ended)
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the trajectory, as plain values."""
        return {
            **{name: getattr(self, name) for name in PLAIN},
            "spans": [list(span) for span in list(self.spans)],
            "failed_attempts": list(self.failed_attempts),
            "attempt": self.attempt.state_dict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], trajectory: Mapping[str, Any] | None) -> Episode:
        """Return the episode that was saved, with the columns of its trajectory."""
        episode = cls(time.monotonic())
        vars(episode).update({name: state[name] for name in PLAIN if name in state})
        episode.spans = [(name, began, ended) for name, began, ended in state["spans"]]
        episode.trajectory = None if trajectory is None else from_columns(trajectory)
        episode.failed_attempts = state.get("failed_attempts", [])
        episode.attempt = AttemptHistory.from_state(state.get("attempt", ()))
        return episode

    def now(self) -> float:
        """Return the seconds after the group's submission."""
        return time.monotonic() - self._submitted


class _OpenSpan:
    """A span of an episode, as long as its block runs. There is one for each request: generators cost more."""

    __slots__ = ("_began", "_episode", "_name")

    def __init__(self, episode: Episode, name: str) -> None:
        self._episode, self._name = episode, name

    def __enter__(self) -> None:
        self._began = self._episode.now()

    def __exit__(self, *_: object) -> None:
        self._episode.spans.append((self._name, self._began, self._episode.now()))


_current: ContextVar[Episode | None] = ContextVar("episode", default=None)


def current_episode() -> Episode | None:
    """Return the episode that this task runs; None outside of episodes."""
    return _current.get()


@contextmanager
def running(episode: Episode) -> Iterator[None]:
    """Make an episode the current one inside of the block, in which its attempts begin and end.

    Args:
        episode: runs in this task.

    Yields:
        None.
    """
    token = _current.set(episode)
    episode.begin()
    try:
        yield
    finally:
        episode.end()
        _current.reset(token)


@contextmanager
def in_reward() -> Iterator[None]:
    """Count the time of the block as the current episode's wait for rewards.

    Yields:
        None.
    """
    episode = _current.get()
    with nullcontext() if episode is None else episode.span("reward"):
        yield
