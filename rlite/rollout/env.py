"""Environments: a Python file with `async step(state, action, extra_info)`, and rollouts of several turns in them."""

from __future__ import annotations

import asyncio
import pickle
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDict

from rlite.data.raw import raw_prompts, raw_tokens
from rlite.errors import ConfigError, DataError
from rlite.rollout.batch import pad_trajectories
from rlite.rollout.env_process import STEP_KEYS, EnvironmentFunction, Step
from rlite.rollout.rewards import RewardFunction
from rlite.rollout.workflow import RolloutError, RolloutWorkflow, Tokenizer, prompt_ids, prompt_text
from rlite.types import AsyncInference, GenerationHyperparameters, LLMRequest, LLMResponse


class Environment:
    """A user's environment file, run in processes that can be killed, as rewards are.

        async def step(state, action, extra_info):
            return {"next_state": ..., "reward": ..., "score": ..., "done": ..., "extra_info": extra_info}

    `state` and `action` are what the model has read and written in the last turn, `next_state` what it reads in the
    next one; the episode ends with `done`, or without a next state. Optionally `async reset(extra_info)` returns the
    first state, instead of the row's prompt. Each call may run in another process: what an episode has to remember
    belongs into `extra_info`.

    Args:
        path: of the file.
        timeout: seconds for one call.
        num_processes: calls that run at the same time; default: the cores, at most 8.

    Raises: ConfigError if the file is not there.
    """

    def __init__(self, path: str | Path, timeout: float = 60.0, num_processes: int | None = None) -> None:
        function = EnvironmentFunction(path)
        self._run = RewardFunction(function, timeout, num_processes=num_processes, what=f"the environment {path}").run
        self._has_reset: bool | None = None

    def check(self) -> None:
        """Import the file where it will run; not from within an event loop. Raises: RewardError with the reason."""
        asyncio.run(self._describe())

    async def _describe(self) -> bool:
        """Whether it has a reset."""
        if self._has_reset is None:
            self._has_reset = pickle.loads(await self._run(method="describe", extra_info=b""))
        return self._has_reset

    async def reset(self, extra_info: bytes) -> tuple[str | None, bytes]:
        """The first state, None if that is the row's prompt, and the pickled extra_info. Raises: RewardError."""
        if not await self._describe():
            return None, extra_info
        return pickle.loads(await self._run(method="reset", extra_info=extra_info))

    async def step(self, state: str, action: str, extra_info: bytes) -> Step:
        """One turn. Raises: RewardError that says what became of it."""
        return pickle.loads(await self._run(method="step", extra_info=extra_info, state=state, action=action))


@dataclass(eq=False)
class _Sequence:
    """Tokens in the order in which the model reads and writes them; what was generated is never tokenised again."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    is_truncated: bool = False

    def read(self, tokens: list[int]) -> None:
        """What the prompt or the environment says."""
        count = len(tokens)
        self._extend(tokens, False, [0.0] * count, [-1] * count)

    def write(self, response: LLMResponse) -> None:
        """A turn of the model."""
        self._extend(response.output_tokens, True, response.output_logprobs, response.output_versions)
        self.is_truncated |= response.stop_reason == "length"

    def reward(self, reward: float) -> None:
        """Of the turn that has just been written, on its last token."""
        self.rewards[-1] += reward

    def give_up(self) -> None:
        """There is no room for another turn: what it would have answered goes."""
        self.is_truncated = True
        while self.loss_mask and not self.loss_mask[-1]:
            for values in (self.tokens, self.loss_mask, self.logprobs, self.versions, self.rewards):
                values.pop()

    def _extend(self, tokens: list[int], is_action: bool, logprobs: list[float], versions: list[int]) -> None:
        self.tokens += tokens
        self.loss_mask += [is_action] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions
        self.rewards += [0.0] * len(tokens)

    def row(self) -> TensorDict:
        columns = {
            "input_ids": torch.tensor([self.tokens]),
            "attention_mask": torch.ones(1, len(self.tokens), dtype=torch.bool),
            "loss_mask": torch.tensor([self.loss_mask]),
            "logprobs": torch.tensor([self.logprobs]),
            "versions": torch.tensor([self.versions]),
            "token_rewards": torch.tensor([self.rewards]),
            "truncated": torch.tensor([self.is_truncated]),
        }
        return TensorDict(columns, batch_size=[1])


class EnvironmentWorkflow(RolloutWorkflow):
    """Turns of the model and of an environment, until it is done or `max_turns` are over.

    Where the next state begins with state + action, the rest of it is tokenised and appended to the same sequence, else
    a new sequence begins in the same trajectory. The item is as `SingleTurnWorkflow` takes it, with `extra_info` for
    the environment.

    A trajectory has one row for each sequence, with the keys of `trajectory()` and `token_rewards` [k, L], the reward
    of each turn on its last token. Per row there are `sequence_index` [k], from 0, and of the whole trajectory
    `rewards` and `scores`, both summed over turns, and `num_turns` [k].

    Args:
        environment: what answers.
        gconfig: how to sample; `max_new_tokens` of each turn.
        tokenizer: of the model.
        max_turns: turns of the model in one episode.
        max_length: tokens of one sequence at which generation stops; None is as many as the engine takes.
        chat_template_options: further keyword arguments for `apply_chat_template`.
    """

    def __init__(
        self,
        environment: Environment,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        max_turns: int = 1,
        max_length: int | None = None,
        chat_template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns={max_turns}: expected at least 1")
        self.environment = environment
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.max_length = max_length
        self.chat_template_options = dict(chat_template_options or {})

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        state, tokens, info = await self._start(data)
        sequence = _Sequence()
        sequence.read(tokens)
        sequences, num_turns, score, episode = [sequence], 0, 0.0, uuid.uuid4().hex
        while self._has_room(sequence):
            response = await self._generate(engine, sequence, episode)
            action = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            step = await self.environment.step(state, action, info)
            sequence.reward(step.reward)
            num_turns, score, info = num_turns + 1, score + step.score, step.extra_info
            if step.is_done or step.next_state is None or num_turns == self.max_turns:
                break
            if step.next_state.startswith(state + action):
                sequence.read(self._continuation(step.next_state[len(state + action) :], response))
            else:
                sequence = _Sequence()
                sequence.read(self._prompt(step.next_state))
                sequences.append(sequence)
            state = step.next_state
        return self._trajectory(sequences, num_turns, score)

    async def _start(self, data: Mapping[str, Any]) -> tuple[str, list[int], bytes]:
        """The first state, as text and as tokens, and the pickled extra_info."""
        state, info = await self.environment.reset(cloudpickle.dumps(data.get("extra_info") or {}))
        if state is not None:
            tokens = self._prompt(state)
        else:
            state = prompt_text(data, self.tokenizer, self.chat_template_options)
            tokens = prompt_ids(data, self.tokenizer, self.chat_template_options)
        if self.max_length is not None and len(tokens) >= self.max_length:
            raise DataError(f"a prompt has {len(tokens)} tokens: no room for an answer in {self.max_length}")
        return state, tokens, info

    async def _generate(self, engine: AsyncInference, sequence: _Sequence, episode: str) -> LLMResponse:
        """One turn, appended to the sequence."""
        gconfig = self.gconfig
        if self.max_length is not None and gconfig.max_new_tokens > self.max_length - len(sequence.tokens):
            room = self.max_length - len(sequence.tokens)
            gconfig = gconfig.new(max_new_tokens=room, min_new_tokens=min(gconfig.min_new_tokens, room))
        # one rid for the episode: its turns find their cache
        response = await engine.agenerate(LLMRequest(input_ids=list(sequence.tokens), gconfig=gconfig, rid=episode))
        if response.stop_reason == "abort":
            raise RolloutError(f"the engine aborted the completion after {response.output_len} tokens")
        sequence.write(response)
        return response

    def _has_room(self, sequence: _Sequence) -> bool:
        """Whether another turn fits; a sequence that has none counts as truncated, without what it cannot answer."""
        if self.max_length is None or len(sequence.tokens) < self.max_length:
            return True
        sequence.give_up()
        return False

    def _continuation(self, text: str, response: LLMResponse) -> list[int]:
        """What the environment adds, without the end token of the turn, if the model has written that itself."""
        tokens = raw_tokens(self.tokenizer, [text])[0]
        end = response.output_tokens[-1:]
        if response.stop_reason == "stop" and tokens[:1] == end and not self._is_visible(end):
            return tokens[1:]
        return tokens

    def _is_visible(self, tokens: list[int]) -> bool:
        return bool(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _prompt(self, state: str) -> list[int]:
        return raw_prompts(self.tokenizer, [state])[0]

    def _trajectory(self, sequences: list[_Sequence], num_turns: int, score: float) -> TensorDict:
        written = [sequence for sequence in sequences if any(sequence.loss_mask)]
        rows = pad_trajectories([sequence.row() for sequence in written]).exclude("group_ids")
        count = len(written)
        rows["sequence_index"] = torch.arange(count)
        rows["num_turns"] = torch.full((count,), num_turns)
        rows["rewards"] = rows["token_rewards"].double().sum().float().expand(count).clone()
        rows["scores"] = torch.full((count,), score, dtype=torch.float32)
        return rows


__all__ = ["STEP_KEYS", "Environment", "EnvironmentWorkflow", "Step"]
