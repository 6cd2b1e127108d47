"""What a model has read and written in one episode, token by token: a trajectory in the making."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict

from rlite.data.chat.raw import bounded_tokens
from rlite.errors import ConfigError, DataError
from rlite.rollout.trajectories import of_trajectory, pad_trajectories, sequence_row
from rlite.rollout.workflow import RolloutError, Tokenizer
from rlite.types import AsyncInference, GenerationHyperparameters, LLMRequest, LLMResponse


@dataclass(eq=False)
class _Sequence:
    """Tokens in the order in which the model reads and writes them; each list has one entry for each token."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    is_truncated: bool = False

    def extend(self, tokens: Sequence[int], is_action: bool, logprobs: list[float], versions: list[int]) -> None:
        self.tokens += tokens
        self.loss_mask += [is_action] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions
        self.rewards += [0.0] * len(tokens)

    def drop_unanswered(self) -> None:
        while self.loss_mask and not self.loss_mask[-1]:
            for values in (self.tokens, self.loss_mask, self.logprobs, self.versions, self.rewards):
                values.pop()

    def row(self) -> TensorDict:
        row = sequence_row(self.tokens, self.loss_mask, self.logprobs, self.versions, is_truncated=self.is_truncated)
        row["token_rewards"] = torch.tensor([self.rewards], dtype=torch.float32)
        return row


class Transcript:
    """The sequences of one episode. What was generated is never tokenised again.

        begin ──> generate ──> read ──> generate ──> ...      one sequence
                                └──> begin ──> generate ...   history was written anew: another sequence

    Tokens that the model has written are trained on, once, with the log-probabilities and versions that they came with;
    tokens that it has only read are not.

    Args:
        prompt: the tokens that the first sequence begins with.
        max_length: tokens of one sequence at which generation stops; None is as many as the engine takes.

    Raises: DataError for a prompt that is empty, or leaves no room for an answer.
    """

    def __init__(self, prompt: Sequence[int], max_length: int | None = None) -> None:
        if max_length is not None and len(prompt) >= max_length:
            raise DataError(f"a prompt has {len(prompt)} tokens: no room for an answer in {max_length}")
        self.max_length = max_length
        self.num_turns = 0
        self._sequences: list[_Sequence] = []
        self._rid = uuid.uuid4().hex
        self.begin(prompt)

    @property
    def tokens(self) -> list[int]:
        """Those of the current sequence, a copy."""
        return list(self._sequences[-1].tokens)

    def begin(self, prompt: Sequence[int]) -> None:
        """Another sequence of the same trajectory, for history that was written anew. Raises: DataError if empty."""
        if not prompt:
            raise DataError("a prompt has no tokens: there is nothing to go on from")
        self._sequences.append(_Sequence())
        self.read(prompt)

    def read(self, tokens: Sequence[int]) -> None:
        """What the prompt, the environment or a tool says."""
        self._sequences[-1].extend(tokens, False, [0.0] * len(tokens), [-1] * len(tokens))

    def write(self, response: LLMResponse) -> None:
        """A turn of the model."""
        sequence = self._sequences[-1]
        sequence.extend(response.output_tokens, True, response.output_logprobs, response.output_versions)
        sequence.is_truncated |= response.stop_reason == "length"
        self.num_turns += 1

    async def generate(self, engine: AsyncInference, gconfig: GenerationHyperparameters) -> LLMResponse | None:
        """The model's next turn, which is written; None if there is no room for one.

        A sequence without room counts as truncated, and what it cannot answer is dropped from it.
        Raises: RolloutError if the engine aborts it, or writes nothing.
        """
        sequence = self._sequences[-1]
        if self.max_length is not None:
            room = self.max_length - len(sequence.tokens)
            if room < 1:
                self.give_up()
                return None
            if gconfig.max_new_tokens > room:
                gconfig = gconfig.new(max_new_tokens=room, min_new_tokens=min(gconfig.min_new_tokens, room))
        # one rid for the episode: its turns find their cache
        response = await engine.agenerate(LLMRequest(input_ids=self.tokens, gconfig=gconfig, rid=self._rid))
        if response.stop_reason == "abort" or not response.output_len:
            what = "aborted the completion" if response.stop_reason == "abort" else "ended the completion"
            raise RolloutError(f"the engine {what} after {response.output_len} tokens")
        self.write(response)
        return response

    def give_up(self) -> None:
        """End the current sequence as truncated; what the model cannot answer is dropped from it."""
        self._sequences[-1].drop_unanswered()
        if not self._sequences[-1].tokens:
            self._sequences.pop()
        self._sequences[-1].is_truncated = True

    def reward(self, reward: float) -> None:
        """Of the turn that has just been written, on its last token."""
        sequence = self._sequences[-1]
        if not sequence.loss_mask[-1]:
            raise RolloutError("a reward belongs to a turn of the model, and the last tokens are not the model's")
        sequence.rewards[-1] += reward

    def trajectory(self, reward: float | None = None, **values: float) -> TensorDict:
        """All of it as rows of one trajectory, [k], one for each sequence in which the model has written.

        The keys are those of `rlite.rollout.workflow.trajectory`, `sequence_index` [k], from 0, and of the whole
        trajectory `num_turns`, `rewards` and `values` [k]. Without a `reward`, `rewards` is the sum of those of turns,
        and `token_rewards` [k, L] has each of them on the last token of its turn.

        Raises: RolloutError if the model has written nothing.
        """
        written = [sequence.row() for sequence in self._sequences if any(sequence.loss_mask)]
        if not written:
            raise RolloutError("the model has written nothing: there is nothing to train on")
        rows, count = pad_trajectories(written).exclude("group_ids"), len(written)
        if reward is None:
            reward = rows["token_rewards"].double().sum().item()
        else:
            rows = rows.exclude("token_rewards")
        rows["sequence_index"] = torch.arange(count)
        rows["num_turns"] = torch.full((count,), self.num_turns)
        return rows.update(of_trajectory(count, rewards=reward, **values))


def continuation(tokenizer: Tokenizer, text: str, response: LLMResponse, limit: int | None = None) -> list[int]:
    """The tokens of `text` after a turn, without the end token that it begins with if the model has written that.

    Raises: TooManyTokens for a text that is far longer than `limit` tokens.
    """
    tokens = bounded_tokens(tokenizer, text, limit)
    end = response.output_tokens[-1:]
    is_written = response.stop_reason == "stop" and tokens[:1] == end
    return tokens[1:] if is_written and not tokenizer.decode(end, skip_special_tokens=True) else tokens


def check_turns(max_turns: int) -> None:
    """Raise ConfigError unless an episode has a turn."""
    if max_turns < 1:
        raise ConfigError(f"max_turns={max_turns}: expected at least 1")


def check_turn_discount(turn_discount: float) -> None:
    """Raise ConfigError unless 0 <= turn_discount <= 1."""
    if not 0 <= turn_discount <= 1:
        raise ConfigError(f"turn_discount={turn_discount!r}: expected a number in [0, 1]")
