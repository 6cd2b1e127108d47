"""Workflows: ordinary async Python that turns one data item into a trajectory."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.batch import NAMED_REWARD
from rlite.data.chat.template import OPTIONAL, ChatTemplate, Tokenizer
from rlite.data.packs import TokenHistory
from rlite.data.prompts import bounded_tokens, end_of, plain_text, raw_prompts, special_ids
from rlite.errors import DataError, EngineAborted
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.score import Reward
from rlite.rollout.rewards.weighted import WeightedRewards, as_reward_function
from rlite.runtime.event_loop import beside_loop
from rlite.types import AsyncInference, GenerationHyperparameters, LLMRequest, LLMResponse, token_ids


class RolloutWorkflow(ABC):
    """Generates one trajectory from one data item. The collector adds concurrency, retries, time-outs and staleness."""

    needs_prompt: bool = True
    """true if a trainer checks beforehand that every row has a prompt, in one of `rlite.data.rows.PROMPT_KEYS`"""
    num_seats: int = 1
    """seats that are trained, each with a baseline of its own; rows of more than one have `seat_ids`"""
    gconfig: GenerationHyperparameters | None = None
    """sampling parameters. A trainer computes the loss for them, and evaluates a greedy copy of the workflow; None
    makes it use its own options"""

    @abstractmethod
    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict | None:
        """Turn one item into a trajectory.

        Args:
            engine: generates; many episodes share it.
            data: a copy of the item.

        Returns:
            A TensorDict of batch size [1], or [k] for k rows that belong together, with `input_ids` and
            `attention_mask` [1, L]; the trainer also needs `loss_mask`, `logprobs` [1, L] and `rewards` [1]. The table
            of `rlite.batch` has all keys. None drops the item.
        """

    def sampled_by(self, gconfig: GenerationHyperparameters) -> Self:
        """Return a copy with other sampling parameters, which shares everything else."""
        other = copy.copy(self)
        other.gconfig = gconfig
        return other

    def opening(self, data: Mapping[str, Any]) -> list[int] | None:
        """Return the prompt's tokens, whose number trainers check; None if they are not known beforehand."""
        return None

    def longest_sequence(self, opening: int) -> int | None:
        """Return the most tokens of a sequence whose prompt has `opening` tokens; None if nothing bounds it."""
        return None


def trajectory(response: LLMResponse, reward: float | None = None) -> TensorDict:
    """Return one completion as a trajectory of batch size [1], with L tokens of prompt and completion.

    The table of `rlite.batch` describes its keys: `input_ids`, `attention_mask`, `loss_mask` (true on the completion),
    `logprobs` and `versions` [1, L], `truncated` [1]; with a reward `rewards` [1], and `reward/NAME` for its parts; if
    the response has `kept_ids`, `kept_counts` [1, L] and `kept_ids` [1, M].
    """
    history = TokenHistory()
    history.read(response.input_tokens)
    history.add(response)
    row = history.row()
    return row if reward is None else row.update(of_trajectory(1, rewards=reward))


def of_trajectory(count: int, **values: float) -> dict[str, Tensor]:
    """Return columns [count] for values of a whole trajectory, and for the parts of a reward that has parts."""
    parts = [value.parts for value in values.values() if isinstance(value, Reward)]
    named = {f"{NAMED_REWARD}{name}": part for own in parts for name, part in own.items()}
    return {key: torch.full((count,), value, dtype=torch.float32) for key, value in (values | named).items()}


class PromptWorkflow(RolloutWorkflow):
    """Base of workflows whose episodes begin with the item's prompt.

    Args:
        gconfig: sampling parameters of each turn, such as `max_new_tokens`.
        tokenizer: the model's tokenizer.
        chat_template_options: further keyword arguments for `apply_chat_template`, e.g. {"enable_thinking": False}.

    Raises:
        ConfigError: an option is out of range.
    """

    gconfig: GenerationHyperparameters

    def __init__(
        self,
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        chat_template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.gconfig = GenerationHyperparameters.from_mapping(gconfig)
        self.tokenizer = tokenizer
        self.chat_template_options = dict(chat_template_options or {})

    def opening(self, data: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens of the item's prompt."""
        prompt = [] if "input_ids" in data else _prompt(data)
        if isinstance(prompt, list) and prompt:
            template = ChatTemplate(self.tokenizer, template_options(data, self.chat_template_options))
            text = template.render(prompt, add_generation_prompt=True)
            template.check(prompt, text, optional=OPTIONAL, add_generation_prompt=True)
        return prompt_ids(data, self.tokenizer, self.chat_template_options)


class SingleTurnWorkflow(PromptWorkflow):
    """One prompt, one completion, one reward: reinforcement learning from verifiable rewards.

    The prompt is the item's `input_ids`, its `messages` (through the chat template), or its `prompt`: a raw text, or
    messages. A raw text gets the tokenizer's special tokens, as in training data. Generated tokens are never tokenised
    again. The reward function receives the item's other keys.

    Args:
        reward_fn: a RewardFunction, WeightedRewards, or a function to make a RewardFunction from.
        gconfig: sampling parameters; one completion per episode (groups are the collector's `group_size`).
        tokenizer: the model's tokenizer.
        chat_template_options: see `PromptWorkflow`.
    """

    def __init__(
        self,
        reward_fn: RewardFunction | WeightedRewards | Callable[..., Any],
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        chat_template_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(gconfig, tokenizer, chat_template_options)
        self.reward_fn = as_reward_function(reward_fn)

    def longest_sequence(self, opening: int) -> int:
        """Return the length of the prompt and the longest completion."""
        return opening + self.gconfig.max_new_tokens

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        """Generate one completion of the item's prompt.

        Returns:
            The trajectory, with its reward.

        Raises:
            EngineAborted: the engine aborts the completion.
        """
        prompt = prompt_text(data, self.tokenizer, self.chat_template_options)
        limit = context_length(engine)
        input_ids = await beside_loop(len(prompt), prompt_ids, data, self.tokenizer, self.chat_template_options, limit)
        response = await engine.agenerate(LLMRequest(input_ids=input_ids, gconfig=self.gconfig))
        check_completed(response)
        said = said_tokens(response, end_ids(engine, self.tokenizer))
        completion = self.tokenizer.decode(said, skip_special_tokens=True)
        arguments = reward_arguments(data, prompt, completion, response.input_tokens, response.output_tokens)
        return trajectory(response, reward=await self.reward_fn(**arguments))


def reward_arguments(
    item: Mapping[str, Any], prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the keyword arguments of a reward function: these four values, and the item's other keys.

    A prompt that is a list of messages is also there, as `messages`.
    """
    messages = {"messages": item["prompt"]} if isinstance(item.get("prompt"), list) else {}
    return {
        **item,
        **messages,
        "prompt": plain_text(prompt),
        "completions": completion,
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
    }


def check_completed(response: LLMResponse) -> None:
    """Check that the engine has not aborted a completion."""
    if response.stop_reason == "abort":
        raise EngineAborted(f"the engine aborted the completion after {response.output_len} tokens")


def context_length(engine: AsyncInference, max_length: int | None = None) -> int | None:
    """Return the most tokens of one sequence: `max_length`, else the engine's limit; None if both are unknown."""
    return getattr(engine, "context_length", None) if max_length is None else max_length


def end_ids(engine: AsyncInference, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that may end a completion: the model's own, and the tokenizer's special tokens."""
    return special_ids(tokenizer).union(getattr(engine, "end_ids", ()))


def said_tokens(response: LLMResponse, ends: Collection[int]) -> list[int]:
    """Return the tokens of a completion without the end token, which need not be a special token."""
    tokens = response.output_tokens
    return tokens[: len(tokens) - len(end_of(tokens, response.stop_reason, ends))]


def prompt_ids(
    data: Mapping[str, Any],
    tokenizer: Tokenizer,
    chat_template_options: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> list[int]:
    """Return an item's prompt as tokens.

    `limit`: context length in tokens; None is unknown.
    """
    if "input_ids" in data:
        return token_ids(data["input_ids"], "the item's input_ids")
    prompt = _prompt(data)
    if isinstance(prompt, str):
        return raw_prompts(tokenizer, [prompt], limit)[0]
    return bounded_tokens(tokenizer, prompt_text(data, tokenizer, chat_template_options), limit)


def prompt_text(
    data: Mapping[str, Any], tokenizer: Tokenizer, chat_template_options: Mapping[str, Any] | None = None
) -> str:
    """Return an item's prompt as text; a raw text comes without the tokenizer's special tokens."""
    if "input_ids" in data:
        return tokenizer.decode(token_ids(data["input_ids"], "the item's input_ids"))
    prompt = _prompt(data)
    if isinstance(prompt, str):
        return prompt
    options = template_options(data, chat_template_options)
    return ChatTemplate(tokenizer, options).render(prompt, add_generation_prompt=True)


def template_options(data: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return options for the chat template: those given, and the `tools` of an item unless tools are given.

    `data`: the item. Its `tools` are for the template if they are JSON schemas.
    """
    tools = data.get("tools")
    has_schemas = isinstance(tools, list) and tools and all(isinstance(tool, Mapping) for tool in tools)
    return {**({"tools": tools} if has_schemas else {}), **(options or {})}


def _prompt(data: Mapping[str, Any]) -> str | list[Any]:
    prompt = data.get("messages", data.get("prompt"))
    is_chat = isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)
    if (is_chat or isinstance(prompt, str)) and prompt:
        return prompt
    expected = "expected input_ids (token ids), messages (a list of {role, content}) or prompt (a text)"
    raise DataError(f"the item has the keys {sorted(data)} and no prompt: {expected}")
