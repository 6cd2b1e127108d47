"""One episode as a record shows it: how far it came, and where its time went.

Tokens that an attempt of an episode has read and written so far, for the record of an episode without trajectory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
from tensordict import TensorDict

from rlite.rollout.trajectories import TokenHistory, from_columns
from rlite.types import TokenChunk


class AttemptHistory:
    """The requests of one attempt of an episode, and the answers to them as they arrive.

    A request whose prompt begins with an earlier prompt and its answer continues that sequence.

    Args:
        sequences: token histories, if the attempt has some already.
    """

    def __init__(self, sequences: Sequence[TokenHistory] = ()) -> None:
        self._sequences = list(sequences)
        self._open: set[TokenHistory] = set()
        """sequences to which an answer is arriving"""

    @contextmanager
    def turn(self, prompt: list[int]) -> Iterator[Callable[[TokenChunk], None]]:
        """Note a request, whose answer arrives inside of the block.

        Args:
            prompt: ids of its tokens.

        Yields:
            A function that takes the answer, chunk by chunk.
        """
        history = next((each for each in reversed(self._sequences) if self._is_continued(each, prompt)), None)
        if history is None:
            history = TokenHistory()
            self._sequences.append(history)
        history.read(prompt[len(history.tokens) :])
        self._open.add(history)
        try:
            yield partial(_write, history)
        finally:
            self._open.discard(history)

    def arrays(self) -> list[dict[str, np.ndarray]]:
        """Return ids, mask, versions and log-probabilities of each sequence; the model wrote where the mask is true."""
        return [_arrays(each) for each in list(self._sequences) if each.tokens]

    def state_dict(self) -> list[dict[str, list[Any]]]:
        """Return plain values."""
        return [{name: column.tolist() for name, column in columns.items()} for columns in self.arrays()]

    @classmethod
    def from_state(cls, state: Sequence[dict[str, list[Any]]]) -> AttemptHistory:
        """Return the history that was saved."""
        return cls([_history(**columns) for columns in state])

    def _is_continued(self, history: TokenHistory, prompt: list[int]) -> bool:
        """Return whether a prompt begins with a sequence to which no answer is arriving."""
        tokens, count = history.tokens, len(history.tokens)
        # most sequences differ in the last token: it is compared first
        return history not in self._open and prompt[count - 1 : count] == tokens[-1:] and prompt[:count] == tokens


def _write(history: TokenHistory, chunk: TokenChunk) -> None:
    versions = [chunk.version] * len(chunk.token_ids)
    history.write(chunk.token_ids, chunk.logprobs, versions, chunk.finish_reason or "abort")


def _arrays(history: TokenHistory) -> dict[str, np.ndarray]:
    count = len(history.tokens)  # another thread may append meanwhile, the tokens at last
    return {
        "ids": np.array(history.tokens[:count], np.int32),
        "mask": np.array(history.loss_mask[:count], bool),
        "versions": np.array(history.versions[:count], np.int32),
        "logprobs": np.array(history.logprobs[:count], np.float32),
    }


def _history(ids: list[int], mask: list[bool], versions: list[int], logprobs: list[float]) -> TokenHistory:
    return TokenHistory(ids, mask, logprobs, versions, rewards=[0.0] * len(ids), kept_ids=[()] * len(ids))


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
