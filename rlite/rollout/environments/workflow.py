"""Environments of a `step` function, whose calls run in processes, and the workflow that plays them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import cloudpickle
from tensordict import TensorDict

from rlite.data.chat.template import Tokenizer
from rlite.errors import shortened
from rlite.rollout.conversation import ConversationWorkflow
from rlite.rollout.environments.file import MAX_MEMORY, StepFile, Turn, read_turn
from rlite.rollout.failures import ENVIRONMENT_ERRORS, EnvironmentFailure
from rlite.runtime.sandbox.function import SandboxFunction
from rlite.types import AsyncInference, GenerationHyperparameters


@contextmanager
def noting(turn: int, action: str) -> Iterator[None]:
    """Add the turn and the action to a failure of the environment inside of the block.

    `turn`: number of the turn, from 1.
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
    def has_reset(self) -> bool:
        """True if the environment itself gives the first state, so that a row needs no prompt. Known after loading."""
        return self._has_reset is True

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


_NOT_EXTRA = ("prompt", "messages", "input_ids", "extra_info")


class EnvironmentWorkflow(ConversationWorkflow):
    """A workflow that alternates turns of the model and of an environment.

    An episode ends when the environment is done or after `max_turns` turns. If the next state begins with state +
    action, the rest of it is tokenised and appended to the same sequence. Otherwise a new sequence begins in the same
    trajectory. The item has the form that `SingleTurnWorkflow` takes. The environment's first `extra_info` is the
    item's `extra_info` with the item's other columns, except for the prompt.

    A trajectory has one row for each sequence, with the keys of `trajectory()` and `token_rewards` [k, L], the reward
    of each turn on its last token. Each row has `sequence_index` [k], from 0. The whole trajectory has `rewards` and
    `scores`, both summed over turns, `num_turns` [k], and `turn_limited` [k], 1 if `max_turns` ended the episode.

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
        self.needs_prompt = not environment.has_reset

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
        score, is_limited = 0.0, False
        while await conversation.ask(engine, self.gconfig) is not None:
            with noting(conversation.transcript.num_turns, conversation.answer):
                info, turn = await self.environment.step(conversation.text, conversation.answer, info)
            conversation.transcript.reward(turn.reward)
            score += turn.score
            if turn.is_done or turn.observation is None:
                break
            if is_limited := conversation.transcript.num_turns == self.max_turns:
                break
            conversation.rewrite(turn.observation)
        return conversation.transcript.trajectory(scores=score, turn_limited=is_limited)


def _extra_info(data: Mapping[str, Any]) -> Any:
    """Return a row's `extra_info`, completed by the row's other columns except the prompt."""
    info = data.get("extra_info") or {}
    if not isinstance(info, Mapping):
        return info
    return {**{name: value for name, value in data.items() if name not in _NOT_EXTRA}, **info}
