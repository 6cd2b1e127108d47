"""Environments: a Python file with `async step(state, action, extra_info)`, and rollouts of several turns in them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
from tensordict import TensorDict

from rlite.data.raw import TooManyTokens, raw_prompts
from rlite.rollout.background import beside_loop
from rlite.rollout.chat.transcript import Transcript, check_turns, continuation
from rlite.rollout.environments.child import STEP_KEYS, EnvironmentFunction, Step, read_step
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.workflow import RolloutWorkflow, Tokenizer, context_length, prompt_ids, prompt_text
from rlite.sandbox.child import MAX_STATE
from rlite.types import AsyncInference, GenerationHyperparameters, LLMResponse

_NOT_EXTRA = ("prompt", "messages", "input_ids", "extra_info")


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
        memory_limit_gib: resident memory that its process may have, in GiB; None leaves it to the machine.
        env_vars: names of environment variables that its process gets as well (see RewardFunction).

    Raises: ConfigError if the file is not there, or an option is out of range.
    """

    def __init__(
        self,
        path: str | Path,
        timeout: float = 60.0,
        num_processes: int | None = None,
        memory_limit_gib: float | None = None,
        env_vars: Sequence[str] = (),
    ) -> None:
        self._ask = RewardFunction(
            EnvironmentFunction(path),
            timeout,
            num_processes=num_processes,
            memory_limit_gib=memory_limit_gib,
            what=f"the environment {path}",
            env_vars=env_vars,
            max_answer=MAX_STATE,
        ).ask
        self._has_reset: bool | None = None

    @property
    def begins_with_prompt(self) -> bool:
        """Whether the first state is the row's prompt; known once the file was looked at."""
        return self._has_reset is False

    def check(self) -> None:
        """Import the file where it will run; not from within an event loop. Raises: RewardError with the reason."""
        asyncio.run(self._describe())

    async def _describe(self) -> bool:
        """Whether it has a reset."""
        if self._has_reset is None:
            self._has_reset = await self._ask(_read_flag, method="describe", extra_info=b"")
        return self._has_reset

    async def reset(self, extra_info: bytes) -> tuple[str | None, bytes]:
        """The first state, None if that is the row's prompt, and the pickled extra_info. Raises: RewardError."""
        if not await self._describe():
            return None, extra_info
        return await self._ask(_read_first, method="reset", extra_info=extra_info)

    async def step(self, state: str, action: str, extra_info: bytes) -> Step:
        """One turn. Raises: RewardError that says what became of it."""
        return await self._ask(read_step, method="step", extra_info=extra_info, state=state, action=action)


def _read_flag(answer: Any) -> bool | None:
    return answer if isinstance(answer, bool) else None


def _read_first(answer: Any) -> tuple[str, bytes] | None:
    match answer:
        case [str() as state, bytes() as extra_info]:
            return state, extra_info
    return None


class EnvironmentWorkflow(RolloutWorkflow):
    """Turns of the model and of an environment, until it is done or `max_turns` are over.

    Where the next state begins with state + action, the rest of it is tokenised and appended to the same sequence, else
    a new sequence begins in the same trajectory. The item is as `SingleTurnWorkflow` takes it. Its `extra_info` and its
    other columns, all but the prompt, are the first `extra_info` of the environment.

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
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_turns: int = 1,
        max_length: int | None = None,
        chat_template_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_turns(max_turns)
        self.environment = environment
        self.gconfig: GenerationHyperparameters = GenerationHyperparameters.from_mapping(gconfig)
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.max_length = max_length
        self.chat_template_options = dict(chat_template_options or {})

    def opening(self, data: Mapping[str, Any]) -> list[int] | None:
        if not self.environment.begins_with_prompt:
            return None
        return prompt_ids(data, self.tokenizer, self.chat_template_options)

    def longest_sequence(self, opening: int) -> int | None:
        return opening + self.gconfig.max_new_tokens if self.max_turns == 1 else None

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        limit = context_length(engine, self.max_length)
        state, tokens, info = await self._start(data, limit)
        transcript, score = Transcript(tokens, self.max_length), 0.0
        while (response := await transcript.generate(engine, self.gconfig)) is not None:
            action = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            step = await self.environment.step(state, action, info)
            transcript.reward(step.reward)
            score, info = score + step.score, step.extra_info
            if step.is_done or step.next_state is None or transcript.num_turns == self.max_turns:
                break
            try:
                await self._read(transcript, state + action, step.next_state, response, limit)
            except TooManyTokens:
                if self.max_length is None:
                    raise
                transcript.give_up()
                break
            state = step.next_state
        return transcript.trajectory(scores=score)

    async def _read(
        self, transcript: Transcript, said: str, next_state: str, response: LLMResponse, limit: int | None
    ) -> None:
        """The next state, after what was said: the rest of it, or all of it as another sequence."""
        if next_state.startswith(said):
            rest = next_state[len(said) :]
            transcript.read(await beside_loop(len(rest), continuation, self.tokenizer, rest, response, limit))
        else:
            transcript.begin(await self._prompt(next_state, limit))

    async def _start(self, data: Mapping[str, Any], limit: int | None) -> tuple[str, list[int], bytes]:
        """The first state, as text and as tokens, and the pickled extra_info."""
        state, info = await self.environment.reset(cloudpickle.dumps(_extra_info(data)))
        if state is not None:
            return state, await self._prompt(state, limit), info
        state = prompt_text(data, self.tokenizer, self.chat_template_options)
        tokens = await beside_loop(len(state), prompt_ids, data, self.tokenizer, self.chat_template_options, limit)
        return state, tokens, info

    async def _prompt(self, state: str, limit: int | None) -> list[int]:
        return (await beside_loop(len(state), raw_prompts, self.tokenizer, [state], limit))[0]


def _extra_info(data: Mapping[str, Any]) -> Any:
    """Everything in a row but its prompt: what it calls `extra_info`, and its other columns below that."""
    info = data.get("extra_info") or {}
    if not isinstance(info, Mapping):
        return info
    return {**{name: value for name, value in data.items() if name not in _NOT_EXTRA}, **info}


__all__ = ["STEP_KEYS", "Environment", "EnvironmentWorkflow", "Step"]
