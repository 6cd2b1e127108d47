"""Workflows that alternate turns of the model and of an environment."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import cloudpickle
from tensordict import TensorDict

from rlite.data.chat.template import Tokenizer, has_chat_template
from rlite.errors import ConfigError, DataError
from rlite.rollout.conversation import ConversationOptions, ConversationWorkflow
from rlite.rollout.environments.environment import Environment, GymEnvironment, ProcessOptions, noting
from rlite.rollout.environments.file import is_gym_file
from rlite.rollout.workflow import RolloutWorkflow
from rlite.types import AsyncInference, GenerationHyperparameters

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
            is_last = conversation.transcript.num_turns == self.max_turns
            if turn.is_done or turn.observation is None or is_last:
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
    if is_gym_file(path):
        game = GymEnvironment(path, timeout, **options)
        game.check()
        return partial(GymWorkflow, game)
    environment = Environment(path, timeout, **options)
    environment.check()
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
