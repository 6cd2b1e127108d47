"""Run Gym-like environments: objects with `reset(seed=...)` and `step(action)` that communicate by texts."""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from rlite.errors import ConfigError, DataError
from rlite.rollout.chat.conversation import ConversationWorkflow, History
from rlite.rollout.environments.child import GymFunction, MakeFile, Turn, advance, close, read_turn, start
from rlite.rollout.environments.errors import ENVIRONMENT_ERRORS, EnvironmentFailure
from rlite.rollout.environments.step import sandboxed
from rlite.rollout.workflow import Tokenizer
from rlite.sandbox.function import limited
from rlite.types import AsyncInference, GenerationHyperparameters


@dataclass(frozen=True)
class GymEpisode:
    """An environment that has been reset."""

    observation: str | None
    """first observation"""
    step: Callable[[str], Awaitable[Turn]]
    """takes an action"""


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
        num_processes: number of calls that run at the same time. Default: the cores, at most 8.
        in_process: run environments in threads of this process instead. A late call ends its episode, but its thread
            continues. The random numbers of `random` and NumPy are the program's.
        memory_limit_gib: resident memory that a process may have, in GiB. None sets no limit.
        env_vars: names of environment variables that the process also receives (see RewardFunction).

    Raises:
        ConfigError: the file does not exist, `make` cannot be pickled, or an option is out of range.
    """

    def __init__(
        self,
        make: Callable[..., Any] | str | Path,
        timeout: float = 60.0,
        num_processes: int | None = None,
        in_process: bool = False,
        memory_limit_gib: float | None = None,
        env_vars: Sequence[str] = (),
    ) -> None:
        self.make = MakeFile(make) if isinstance(make, str | Path) else make
        self.timeout = timeout
        self.name = f"the environment {make if isinstance(make, str | Path) else getattr(make, '__name__', make)}"
        if in_process and memory_limit_gib is not None:
            raise ConfigError(f"memory_limit_gib={memory_limit_gib}, in_process=True: a limit needs a process")
        self._function = None
        if not in_process:
            self._function = sandboxed(
                GymFunction(self.make), timeout, num_processes, memory_limit_gib, self.name, env_vars
            )

    def check(self) -> None:
        """Load the factory in its sandbox process. Do not call this method from within an event loop.

        Raises:
            EnvironmentFailure: the factory cannot be loaded.
        """
        if self._function is not None:
            asyncio.run(self._function.ask(read_turn, method="check"))

    @contextlib.asynccontextmanager
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
        arguments = {"seed": seed, "options": dict(options or {})}
        if self._function is not None:
            ask = partial(self._function.ask, read_turn)
            memory, turn = await ask(method="reset", **arguments)

            async def step(action: str) -> Turn:
                nonlocal memory, turn
                memory, turn = await ask(method="step", memory=memory, action=action)
                return turn

            yield GymEpisode(turn.observation, step)
            return
        environment, turn = await self._in_thread(start, self.make, **arguments)

        async def advance_here(action: str) -> Turn:
            nonlocal turn
            turn = await self._in_thread(advance, environment, action)
            return turn

        try:
            yield GymEpisode(turn.observation, advance_here)
        finally:
            if not turn.is_done:
                with contextlib.suppress(EnvironmentFailure):  # it was abandoned, for a reason that matters more
                    await self._in_thread(close, environment)

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
    `sequence_index` and `num_turns` [k].

    Args:
        environment: answers each turn of the model.
        gconfig: sampling parameters. `max_new_tokens` applies to each turn.
        tokenizer: the model's tokenizer.
        max_turns: maximum number of the model's turns in one episode.
        max_length: number of tokens of one sequence at which generation stops. None is the engine's maximum.
        system_prompt: a message before the first observation; before raw texts, a text.
        is_chat: whether observations are messages. Default: whether the tokenizer has a chat template.
        chat_template_options: further keyword arguments for `apply_chat_template`.
        history: "tokens" or "template". See `Conversation`.

    Raises:
        ConfigError: an option is out of range.
    """

    needs_prompt = False

    def __init__(
        self,
        environment: GymEnvironment,
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_turns: int = 16,
        max_length: int | None = None,
        system_prompt: str | None = None,
        is_chat: bool | None = None,
        chat_template_options: Mapping[str, Any] | None = None,
        history: History = "tokens",
    ) -> None:
        super().__init__(
            gconfig=gconfig,
            tokenizer=tokenizer,
            chat_template_options=chat_template_options,
            max_turns=max_turns,
            max_length=max_length,
            history=history,
        )
        has_template = getattr(tokenizer, "chat_template", None) is not None
        if is_chat and not has_template:
            raise ConfigError("is_chat=True: the tokenizer has no chat template")
        self.environment = environment
        self.system_prompt = system_prompt
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
            conversation = self.begin(self._prompt(episode.observation))
            while await conversation.ask(engine, self.gconfig) is not None:
                transcript = conversation.transcript
                turn = await episode.step(conversation.answer)
                transcript.reward(turn.reward)
                if turn.is_done or transcript.num_turns == self.max_turns:
                    break
                conversation.reply({"role": "user", "content": turn.observation})
            return conversation.transcript.trajectory()

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
        raise DataError(
            f"the item has seed={data.get('seed')!r} (keys: {sorted(data)}): expected a seed, a whole number from 0"
        )
    return seed
