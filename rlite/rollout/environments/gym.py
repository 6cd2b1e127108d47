"""Gym-like environments: their episodes in sandbox processes, and the workflow that plays them."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Unpack

from tensordict import TensorDict

from rlite.data.chat.template import Tokenizer, has_chat_template
from rlite.errors import ConfigError, DataError
from rlite.rollout.conversation import ConversationOptions, ConversationWorkflow
from rlite.rollout.environments import gym_calls
from rlite.rollout.environments.file import MakeFile, Turn, read_turn
from rlite.rollout.environments.workflow import ProcessOptions, noting, sandboxed
from rlite.rollout.failures import ENVIRONMENT_ERRORS, EnvironmentFailure
from rlite.runtime.sandbox.function import limited
from rlite.types import AsyncInference, GenerationHyperparameters


class GymEpisode(NamedTuple):
    """An environment that has been reset."""

    observation: str | None
    """first observation"""
    step: Callable[[str], Awaitable[Turn]]
    """takes an action"""


class GymEpisodes(Protocol):
    """Environments of one kind, whose actions and observations are texts."""

    def episode(self, seed: int, options: Mapping[str, Any] | None = None) -> AbstractAsyncContextManager[GymEpisode]:
        """Begin an episode, which ends with the block."""


class GymEnvironment:
    """Environments of one kind, created by a factory for each episode and run in processes that can be killed.

        reset(seed=...) -> (observation, info)
        step(action) -> (observation, reward, terminated, truncated, info)

    The methods are Gymnasium's. Observations and actions are texts. GEM's environments (`gem.make`) and TextArena's
    games of one player (`textarena.make`) fit. Between two steps an environment is pickled, together with the random
    states of `random` and NumPy. The seed decides these states, so an episode depends only on its seed. An environment
    with contents that cannot be pickled (a connection, a process) runs `in_process`.

    Args:
        make: a function that returns a new environment, or the path of a Python file with such a function `make`. Its
            keyword arguments are the row's `env_options`.
        timeout: seconds for one call. Making and resetting is one call, and each step is one call.
        in_process: run environments in threads of this process instead. A late call ends its episode, but its thread
            continues. The random numbers of `random` and NumPy are the program's.
        **options: see `ProcessOptions`.

    Raises:
        ConfigError: the file does not exist, `make` cannot be pickled, or an option is out of range.
    """

    def __init__(
        self,
        make: Callable[..., Any] | str | Path,
        timeout: float = 60.0,
        *,
        in_process: bool = False,
        **options: Unpack[ProcessOptions],
    ) -> None:
        self.make = MakeFile(make) if isinstance(make, str | Path) else make
        self.timeout = timeout
        self.name = f"the environment {getattr(make, '__name__', make)}"
        limit = options.get("memory_limit_gib")
        if in_process and limit is not None:
            raise ConfigError(f"memory_limit_gib={limit}, in_process=True: a limit needs a process")
        function = gym_calls.GymFunction(self.make)
        self._function = None if in_process else sandboxed(function, timeout, what=self.name, **options)

    def check(self) -> None:
        """Load the factory in its sandbox process. Do not call this method from within an event loop.

        Raises:
            EnvironmentFailure: the factory cannot be loaded.
        """
        if self._function is not None:
            asyncio.run(self._function.ask(read_turn, method="check"))

    @asynccontextmanager
    async def episode(self, seed: int, options: Mapping[str, Any] | None = None) -> AsyncIterator[GymEpisode]:
        """Begin an episode in a new environment.

        Args:
            seed: seed for the environment's `reset`.
            options: keyword arguments of the factory.

        Yields:
            The episode.

        Raises:
            EnvironmentFailure: a call failed. The class depends on the outcome.
        """
        memory, turn = await self._ask("reset", seed=seed, options=dict(options or {}))

        async def step(action: str) -> Turn:
            nonlocal memory, turn
            memory, turn = await self._ask("step", memory=memory, action=action)
            return turn

        try:
            yield GymEpisode(turn.observation, step)
        finally:
            if self._function is None and not turn.is_done:
                with suppress(EnvironmentFailure):  # it was abandoned, for a reason that matters more
                    await self._in_thread(gym_calls.close, memory)

    async def _ask(self, method: str, memory: Any = b"", **arguments: Any) -> tuple[Any, Turn]:
        """Return the next memory and the turn of a call. In this process, the memory is the environment itself."""
        if self._function is not None:
            return await self._function.ask(read_turn, method=method, memory=memory, **arguments)
        if method == "reset":
            return await self._in_thread(gym_calls.start, self.make, **arguments)
        return memory, await self._in_thread(gym_calls.advance, memory, **arguments)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        async with limited(self.name, self.timeout, ENVIRONMENT_ERRORS):
            return await asyncio.to_thread(function, *arguments, **options)


class GymWorkflow(ConversationWorkflow):
    """A workflow that alternates turns of the model and of a Gym-like environment.

    An episode ends when the environment has ended or after `max_turns` turns. The item has a `seed`, a whole number
    from 0, which all samples of a group share, and optionally `env_options`, the factory's keyword arguments.
    Observations are user messages rendered by the chat template, or raw texts. Actions are the texts of the model's
    turns. Tokens written by the model are never tokenised again.

    A trajectory has the keys of `trajectory()`, all turns in one sequence (see `Conversation` for history="template").
    It also has `token_rewards` [k, L], the reward of each turn on its last token, `rewards` [k], their sum, and
    `sequence_index`, `num_turns` and `turn_limited` [k] (1 if `max_turns` ended the episode).

    Args:
        environment: answers each turn of the model.
        gconfig: sampling parameters. `max_new_tokens` applies to each turn.
        tokenizer: the model's tokenizer.
        max_turns: maximum number of the model's turns in one episode.
        max_length: number of tokens of one sequence at which generation stops. None is the engine's maximum.
        system_prompt: a message before the first observation; before raw texts, a text.
        is_chat: whether observations are messages. Default: whether the tokenizer has a chat template.
        **options: see `ConversationOptions`.

    Raises:
        ConfigError: an option is out of range.
    """

    needs_prompt = False

    def __init__(
        self,
        environment: GymEpisodes,
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_turns: int = 16,
        max_length: int | None = None,
        system_prompt: str | None = None,
        is_chat: bool | None = None,
        **options: Unpack[ConversationOptions],
    ) -> None:
        super().__init__(gconfig, tokenizer, max_turns, max_length, **options)
        has_template = has_chat_template(tokenizer)
        if is_chat and not has_template:
            raise ConfigError("is_chat=True: the tokenizer has no chat template")
        self.environment, self.system_prompt = environment, system_prompt
        self.is_chat = has_template if is_chat is None else is_chat

    def opening(self, data: Mapping[str, Any]) -> None:
        """Return None, because the environment decides the prompt."""

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        """Return the trajectory of one episode.

        Args:
            engine: generates the model's turns.
            data: the item, with `seed` and optionally `env_options`.
        """
        async with self.environment.episode(_seed(data), data.get("env_options")) as episode:
            conversation, is_limited = self.begin(self._prompt(episode.observation)), False
            while await conversation.ask(engine, self.gconfig) is not None:
                transcript = conversation.transcript
                with noting(transcript.num_turns, conversation.answer):
                    turn = await episode.step(conversation.answer)
                transcript.reward(turn.reward)
                is_limited = not turn.is_done and transcript.num_turns == self.max_turns
                if turn.is_done or is_limited:
                    break
                conversation.reply({"role": "user", "content": turn.observation})
            return conversation.transcript.trajectory(turn_limited=is_limited)

    def _prompt(self, observation: str | None) -> dict[str, Any]:
        if not self.is_chat:
            return {"prompt": f"{self.system_prompt or ''}{observation}"}
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        return {"messages": [*system, {"role": "user", "content": observation}]}


def _seed(data: Mapping[str, Any]) -> int:
    try:
        seed = operator.index(data.get("seed"))  # type: ignore[arg-type]
    except TypeError:
        seed = -1
    if seed < 0:
        expected = "expected a seed, a whole number from 0"
        raise DataError(f"the item has seed={data.get('seed')!r} (keys: {sorted(data)}): {expected}")
    return seed
