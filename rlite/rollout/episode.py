"""One episode: its view of the engine, with random numbers of its own, and what a record shows of it.

Random numbers depend on what is generated, not on when: they are keyed by seed, policy version, item, sample and turn.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from tensordict import TensorDict

from rlite.errors import RolloutError
from rlite.rollout.draws import AttemptHistory, Draw, Draws, chunks_of
from rlite.types import AsyncInference, LLMRequest, LLMResponse, OnChunk, TokenChunk

Answer = TypeVar("Answer", bound=LLMResponse | TokenChunk)
Value = TypeVar("Value")
REFUSAL_DELAY = 1.0
"""seconds until a request of an attempt that is over is refused"""


class Episode:
    """One episode of a group, over all of its attempts.

    Times are seconds by `time.monotonic` after the submission of the group. Spans may overlap.

    `siblings`: all episodes of the group, in order; the episode forgets them at its end.
    """

    def __init__(self, submitted: float, siblings: Sequence[Episode] = ()) -> None:
        self._submitted, self.siblings = submitted, siblings
        self.item, self.sample, self.is_trained = "", 0, False
        """name of the data item, the episode's number among those of the item, and whether it is trained on"""
        self.started: float | None = None
        self.ended: float | None = None
        self.ended_at: float | None = None
        """Unix time of the end"""
        self.spans: list[tuple[str, float, float]] = []
        """waits for the engine (`generate`) and for rewards (`reward`): name, start and end"""
        self.num_tokens = 0
        """tokens that the current attempt has generated so far"""
        self.trajectory: TensorDict | None = None
        """checked, as soon as the episode has succeeded"""
        self.attempt = AttemptHistory()
        """tokens of the last attempt, if they are kept; empty as soon as there is a trajectory"""
        self.failure = ""
        """error of the last attempt, if no attempt was left"""
        self.failed_attempts: list[str] = []
        """kinds of the errors of the attempts that failed, in order"""
        self.redrawn = ""
        """kind of the failure after which the episode drew other answers than before; empty if it did not"""
        self.answer: str | None = None
        """answer that the reward of the current attempt has named"""
        self._answered_by: object = None

    def begin_attempt(self) -> None:
        """Begin another attempt: forget what an earlier one has written and answered."""
        self.attempt, self.num_tokens = AttemptHistory(), 0
        self.answer = self._answered_by = None

    def take_trajectory(self, trajectory: TensorDict | None) -> None:
        """Keep what the workflow has returned.

        `trajectory`: checked; None if the workflow refuses the group.
        """
        self.trajectory = trajectory
        if trajectory is not None:
            self.attempt = AttemptHistory()

    def take_answer(self, reward: object, answer: str | None) -> None:
        """Keep the answer that a reward has named. Without one, the former answer of the same reward is removed.

        `answer`: None if the reward names no answer.
        """
        if answer is not None or self._answered_by is reward:
            self.answer, self._answered_by = answer, reward

    def end(self) -> None:
        """End the last attempt."""
        # episodes that know each other, with their trajectories, would stay until a full garbage collection
        self.ended, self.ended_at, self.siblings = self.now(), time.time(), ()

    def now(self) -> float:
        """Return the seconds after the group's submission."""
        return time.monotonic() - self._submitted


class Span:
    """A context that records the time of its block as a span of an episode. Generators would cost more."""

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
    """Make an episode the current one inside of the block, in which its attempts begin and end."""
    token = _current.set(episode)
    episode.started = episode.now()
    try:
        yield
    finally:
        episode.end()
        _current.reset(token)


_NOTHING = nullcontext()


def in_reward() -> AbstractContextManager[None]:
    """Return a context that counts the time of its block as the current episode's wait for rewards."""
    episode = _current.get()
    return _NOTHING if episode is None else Span(episode, "reward")


def mix(seed: int, number: int) -> int:
    """Return a 63-bit seed made of two numbers (splitmix64)."""
    mask = 2**64 - 1
    z = (seed * 0x9E3779B97F4A7C15 + number + 0x632BE59BD9B4E019) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def group_seed(seed: int | None, version: int, position: int) -> int | None:
    """Return the seed of a group, if there is a seed.

    `position`: the item's, among the submitted ones. A resumed run submits the same items at the same positions.
    """
    return None if seed is None else mix(mix(seed, version), position)


class SampleInference:
    """The engine as one attempt at an episode sees it: episodes of one item draw different random numbers.

    A request without a seed gets one from the episode's seed and the turn, if the episode has a seed. A request with a
    seed keeps it in the first episode of its item, and gets a different one in each other episode. A request that an
    earlier attempt has made gets the answer of that attempt, see `rlite.rollout.draws`.

    A request that truncates asks for `kept_ids`, if the episode is trained on and the engine offers them.

    `engine`: generates; its other attributes are available, too. `seed`: of the episode; None leaves the random numbers
    to the order of requests. `affinity`: replaces the `rid` of all requests: siblings share a replica, which prefills
    their prompt once.
    """

    def __init__(
        self,
        engine: AsyncInference,
        episode: Episode,
        draws: Draws,
        sample: int = 0,
        seed: int | None = None,
        affinity: str | None = None,
        is_trained: bool = False,
        keeps_tokens: bool = False,
        extras: Sequence[str] = (),
    ) -> None:
        self._engine, self._episode, self._draws = engine, episode, draws
        self._sample, self._seed, self._affinity = sample, seed, affinity
        self._has_kept_ids = is_trained and "kept_ids" in getattr(engine, "extras", ())
        self._keeps_tokens, self._extras = keeps_tokens, tuple(extras) if is_trained else ()
        self._turns = itertools.count()
        self._is_over = False

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]  # workflows may use an engine's other attributes
        return getattr(self._engine, name)

    async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
        """Return the engine's answer to a request with this episode's seed."""
        await self._check_open()
        with self._turn(request, False, on_chunk) as (draw, note):
            if isinstance(draw.answer, LLMResponse):
                answer = copied(draw.answer)
                for chunk in chunks_of(answer):
                    note(chunk)
                return changed(answer, metadata=dict(request.metadata))
            response = await self._engine.agenerate(self._own(request, draw.seed), note)
            draw.answer = None if response.stop_reason == "abort" else copied(response, tuple)
            return response

    async def stream(self, request: LLMRequest) -> AsyncIterator[TokenChunk]:
        """Yield the engine's answer to a request with this episode's seed."""
        await self._check_open()
        with self._turn(request, True) as (draw, note):
            if isinstance(draw.answer, list):
                for chunk in draw.answer:
                    note(chunk)
                    yield copied(chunk)
                return
            written: list[TokenChunk] = []
            async with aclosing(self._engine.stream(self._own(request, draw.seed))) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    note(chunk)
                    written.append(copied(chunk, tuple))
                    draw.answer = None if chunk.finish_reason in (None, "abort") else written
                    yield chunk

    def end(self) -> None:
        """End the attempt: further requests are refused."""
        self._is_over = True

    async def _check_open(self) -> None:
        """Refuse requests after the attempt's end. The delay keeps a loop that ignores errors from turning quickly."""
        if self._is_over:
            await asyncio.sleep(REFUSAL_DELAY)
            raise RolloutError("the attempt at this episode has ended; its requests are no longer answered")

    @contextmanager
    def _turn(
        self, request: LLMRequest, is_stream: bool, on_chunk: OnChunk | None = None
    ) -> Iterator[tuple[Draw, OnChunk]]:
        """Record a wait for the engine, which answers a request inside of the block.

        Yields the draw of the request, and a function that takes the tokens as they arrive.
        """
        draw, episode = self._draw(request, is_stream), self._episode
        kept = episode.attempt.turn(request.input_ids) if self._keeps_tokens else nullcontext()
        try:
            with Span(episode, "generate"), kept as write:
                yield draw, partial(self._note, draw, write, on_chunk)
        except (asyncio.CancelledError, GeneratorExit):
            draw.has_begun = True
            raise

    def _note(self, draw: Draw, write: OnChunk | None, on_chunk: OnChunk | None, chunk: TokenChunk) -> None:
        self._episode.num_tokens += len(chunk.token_ids)
        draw.has_begun |= bool(chunk.token_ids)
        if write is not None:
            write(chunk)
        if on_chunk is not None:
            on_chunk(chunk)

    def _draw(self, request: LLMRequest, is_stream: bool) -> Draw:
        seed, version = self._seed_of(request), self._engine.get_version()
        key = hash((is_stream, tuple(request.input_ids), request.gconfig, tuple(request.extras)))
        draw = Draw(key, seed, None if seed is None and not request.gconfig.greedy else version)
        if self._draws.earlier:
            draw = self._draws.again(draw, version)
        self._draws.own.append(draw)
        return draw

    def _seed_of(self, request: LLMRequest) -> int | None:
        turn, seed = next(self._turns), request.gconfig.seed
        if seed is None:
            return None if self._seed is None else mix(self._seed, turn)
        return mix(seed, self._sample) if self._sample > 0 else seed

    def _own(self, request: LLMRequest, seed: int | None) -> LLMRequest:
        extras = request.extras
        kept_ids = ("kept_ids",) if self._has_kept_ids and request.gconfig.is_truncating else ()
        if wanted := kept_ids + self._extras:
            extras = (*extras, *(name for name in wanted if name not in extras))
        gconfig = request.gconfig if seed == request.gconfig.seed else changed(request.gconfig, seed=seed)
        if gconfig is request.gconfig and extras is request.extras and not self._affinity:
            return request
        return changed(request, gconfig=gconfig, rid=self._affinity or request.rid, extras=extras)


def changed(value: Value, **fields: Any) -> Value:
    """Return a copy of a frozen dataclass with other fields, which are not validated again."""
    own = object.__new__(type(value))  # copy.copy takes five times as long
    vars(own).update(vars(value), **fields)
    return own


def copied(answer: Answer, kind: type[list[Any]] | type[tuple[Any, ...]] = list) -> Answer:
    """Return an answer, or a chunk of one, with lists of its own."""
    columns = {name: kind(values) for name, values in vars(answer).items() if isinstance(values, list | tuple)}
    return changed(answer, **columns, extras={name: kind(column) for name, column in answer.extras.items()})
