"""Episodes in environments: `step` functions and Gym-like environments, whose calls run in processes."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import cloudpickle
from tensordict import TensorDict

from rlite.data.chat.template import Tokenizer, has_chat_template
from rlite.errors import ConfigError, DataError, shortened
from rlite.rollout.conversation import ConversationOptions, ConversationWorkflow
from rlite.rollout.environments import gym
from rlite.rollout.environments.file import MAX_MEMORY, MakeFile, StepFile, Turn, is_gym_file, read_turn
from rlite.rollout.failures import ENVIRONMENT_ERRORS, EnvironmentFailure
from rlite.rollout.workflow import RolloutWorkflow
from rlite.runtime.sandbox.function import SandboxFunction, limited
from rlite.types import AsyncInference, GenerationHyperparameters


@contextmanager
def noting(turn: int, action: str) -> Iterator[None]:
    """Add the turn and the action to a failure of the environment inside of the block.

    Args:
        turn: number of the turn, from 1.
        action: text that the model has written.

    Yields:
        None.

    Raises:
        EnvironmentFailure: the failure, with a note.
    """
    try:
        yield
    except EnvironmentFailure as error:
        error.add_note(f"turn {turn}, action: {shortened(action)}")
        raise


sandboxed = partial(SandboxFunction, max_answer=MAX_MEMORY, errors=ENVIRONMENT_ERRORS)
"""makes a kind of environments a function that runs in sandbox processes"""


class ProcessOptions(TypedDict, total=False):
    """Keyword arguments of every kind of environment, for its processes."""

    num_processes: int | None
    """number of calls that run at the same time. Default: the cores, at most 8"""
    memory_limit_gib: float | None
    """resident memory that a process may have, in GiB. None sets no limit"""
    env_vars: Sequence[str]
    """names of environment variables that the process also receives (see RewardFunction)"""


class Environment:
    """A user's environment file, run in processes that can be killed, as rewards are.

        async def step(state, action, extra_info):
            return {"next_state": ..., "reward": ..., "score": ..., "done": ..., "extra_info": extra_info}

    `state` is the text that the model has read in the last turn, `action` the text that it has written. `next_state` is
    the text that it reads in the next turn. The episode ends with `done`, or without a next state. Optionally `async
    reset(extra_info)` returns the first state, instead of the row's prompt. Each call may run in another process, so
    put the state of an episode into `extra_info`.

    Args:
        path: path of the file.
        timeout: seconds for one call.
        **options: see `ProcessOptions`.

    Raises:
        ConfigError: the file does not exist, or an option is out of range.
    """

    def __init__(self, path: str | Path, timeout: float = 60.0, **options: Unpack[ProcessOptions]) -> None:
        self._ask = sandboxed(StepFile(path), timeout, what=f"the environment {path}", **options).ask
        self._has_reset: bool | None = None

    @property
    def begins_with_prompt(self) -> bool:
        """True if the first state is the row's prompt. It is known once the file was loaded."""
        return self._has_reset is False

    def check(self) -> None:
        """Import the file in its sandbox process. Do not call this method from within an event loop.

        Raises:
            EnvironmentFailure: the file cannot be loaded, or has no `step`.
        """
        _, turn = asyncio.run(self._ask(read_turn, method="check"))
        self._has_reset = turn.observation is not None

    async def reset(self, extra_info: bytes) -> tuple[bytes, Turn]:
        """Begin an episode.

        Args:
            extra_info: pickled `extra_info`.

        Returns:
            The next pickled `extra_info`, and a turn whose observation is the first state. The observation is None if
                the first state is the row's prompt.

        Raises:
            EnvironmentFailure: the call failed. The class depends on the outcome.
        """
        if self._has_reset is False:
            return extra_info, Turn(None)
        memory, turn = await self._ask(read_turn, method="reset", memory=extra_info)
        self._has_reset = turn.observation is not None
        return memory, turn

    async def step(self, state: str, action: str, extra_info: bytes) -> tuple[bytes, Turn]:
        """Make one step.

        Args:
            state: text that the model has read.
            action: text that the model has written.
            extra_info: pickled `extra_info`.

        Returns:
            The next pickled `extra_info`, and the turn.

        Raises:
            EnvironmentFailure: the call failed. The class depends on the outcome.
        """
        return await self._ask(read_turn, method="step", memory=extra_info, state=state, action=action)


class GymEpisode(NamedTuple):
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
        function = gym.GymFunction(self.make)
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
                    await self._in_thread(gym.close, memory)

    async def _ask(self, method: str, memory: Any = b"", **arguments: Any) -> tuple[Any, Turn]:
        """Return the next memory and the turn of a call. In this process, the memory is the environment itself."""
        if self._function is not None:
            return await self._function.ask(read_turn, method=method, memory=memory, **arguments)
        if method == "reset":
            return await self._in_thread(gym.start, self.make, **arguments)
        return memory, await self._in_thread(gym.advance, memory, **arguments)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        async with limited(self.name, self.timeout, ENVIRONMENT_ERRORS):
            return await asyncio.to_thread(function, *arguments, **options)


_NOT_EXTRA = ("prompt", "messages", "input_ids", "extra_info")


class EnvironmentWorkflow(ConversationWorkflow):
    """A workflow that alternates turns of the model and of an environment.

    An episode ends when the environment is done or after `max_turns` turns. If the next state begins with state +
    action, the rest of it is tokenised and appended to the same sequence. Otherwise a new sequence begins in the same
    trajectory. The item has the form that `SingleTurnWorkflow` takes. The environment's first `extra_info` is the
    item's `extra_info` with the item's other columns, except for the prompt.

    A trajectory has one row for each sequence, with the keys of `trajectory()` and `token_rewards` [k, L], the reward
    of each turn on its last token. Each row has `sequence_index` [k], from 0. The whole trajectory has `rewards` and
    `scores`, both summed over turns, and `num_turns` [k].

    Args:
        environment: answers each turn of the model.
        gconfig: sampling parameters. `max_new_tokens` applies to each turn.
        tokenizer: the model's tokenizer.
        max_turns: maximum number of the model's turns in one episode.
        max_length: number of tokens of one sequence at which generation stops. None is the engine's maximum.
        chat_template_options: further keyword arguments for `apply_chat_template`.
    """

    def __init__(
        self,
        environment: Environment,
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_turns: int = 1,
        max_length: int | None = None,
        chat_template_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(gconfig, tokenizer, max_turns, max_length, chat_template_options)
        self.environment = environment

    def opening(self, data: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens of the row's prompt if episodes begin with it, else None."""
        return super().opening(data) if self.environment.begins_with_prompt else None

    def longest_sequence(self, opening: int) -> int | None:
        """Return the maximum length of a sequence in tokens if it is known, else None.

        Args:
            opening: number of tokens of the prompt.
        """
        return opening + self.gconfig.max_new_tokens if self.max_turns == 1 else None

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        """Return the trajectory of one episode.

        Args:
            engine: generates the model's turns.
            data: the item.

        Raises:
            TooManyTokens: a state exceeds the engine's context, and no `max_length` is set.
        """
        info, turn = await self.environment.reset(cloudpickle.dumps(_extra_info(data)))
        conversation = self.begin(data if turn.observation is None else {"prompt": turn.observation})
        score = 0.0
        while await conversation.ask(engine, self.gconfig) is not None:
            with noting(conversation.transcript.num_turns, conversation.answer):
                info, turn = await self.environment.step(conversation.text, conversation.answer, info)
            conversation.transcript.reward(turn.reward)
            score += turn.score
            if turn.is_done or turn.observation is None or conversation.transcript.num_turns == self.max_turns:
                break
            conversation.rewrite(turn.observation)
        return conversation.transcript.trajectory(scores=score)


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
        **options: see `ConversationOptions`.

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
            conversation = self.begin(self._prompt(episode.observation))
            while await conversation.ask(engine, self.gconfig) is not None:
                transcript = conversation.transcript
                with noting(transcript.num_turns, conversation.answer):
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


def environment_workflow(
    path: str | Path, timeout: float = 60.0, **options: Unpack[ProcessOptions]
) -> Callable[..., RolloutWorkflow]:
    """Return a function of (gconfig, tokenizer, max_turns, max_length) that makes workflows in a file's environment.

    The file is a GymEnvironment if it has a function `make` and no `step`. Otherwise it is an Environment. The file is
    loaded once in its sandbox process. Do not call this function from within an event loop.

    Args:
        path: path of the file.
        timeout: seconds for one call.
        **options: see `ProcessOptions`.

    Raises:
        ConfigError: there is no such file, or it is not a Python file.
        EnvironmentFailure: the file cannot be loaded, or has neither function.
    """
    environment = (GymEnvironment if is_gym_file(path) else Environment)(path, timeout, **options)
    environment.check()
    if isinstance(environment, GymEnvironment):
        return partial(GymWorkflow, environment)
    return partial(EnvironmentWorkflow, environment)


def _extra_info(data: Mapping[str, Any]) -> Any:
    """Return a row's `extra_info`, completed by the row's other columns except the prompt."""
    info = data.get("extra_info") or {}
    if not isinstance(info, Mapping):
        return info
    return {**{name: value for name, value in data.items() if name not in _NOT_EXTRA}, **info}


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
