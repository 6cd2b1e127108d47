"""Token histories: the tokens that a model reads and writes in one episode, which become a trajectory."""

from __future__ import annotations

import math
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
class TokenHistory:
    """Tokens of one sequence in the order in which the model reads and writes them. Each list has one entry per token.

    Tokens that the model has written are trained on, once, with their log-probabilities and versions. Tokens that it
    has only read are not.
    """

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    is_truncated: bool = False

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens of a prompt, an environment or a tool."""
        self._append(tokens, False, [0.0] * len(tokens), [-1] * len(tokens))

    def write(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, is_truncated: bool
    ) -> None:
        """Append one turn of the model.

        Args:
            tokens: the output.
            logprobs: one per token.
            versions: the version of the weights, one per token.
            is_truncated: the turn has no end of its own.
        """
        self._append(tokens, True, logprobs, versions)
        self.is_truncated |= is_truncated

    def reward(self, reward: float) -> None:
        """Add the reward of the turn that was written last, on its last token.

        Raises:
            RolloutError: the last tokens are not the model's.
        """
        if not self.loss_mask[-1]:
            raise RolloutError("a reward belongs to a turn of the model, and the last tokens are not the model's")
        self.rewards[-1] += reward

    def drop_unanswered(self) -> None:
        """Remove the tokens after the last turn of the model."""
        while self.loss_mask and not self.loss_mask[-1]:
            for values in (self.tokens, self.loss_mask, self.logprobs, self.versions, self.rewards):
                values.pop()

    def row(self) -> TensorDict:
        """Return the sequence as a trajectory of batch size [1], with `token_rewards` [1, L] float32."""
        row = sequence_row(self.tokens, self.loss_mask, self.logprobs, self.versions, is_truncated=self.is_truncated)
        row["token_rewards"] = torch.tensor([self.rewards], dtype=torch.float32)
        return row

    def _append(
        self, tokens: Sequence[int], is_action: bool, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self.tokens += tokens
        self.loss_mask += [is_action] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions
        self.rewards += [0.0] * len(tokens)


def join_histories(histories: Sequence[TokenHistory], num_turns: int) -> TensorDict:
    """Return the sequences of one episode as the rows of one trajectory.

    Args:
        histories: at least one, each with a turn of the model.
        num_turns: the turns of the episode.

    Returns:
        A TensorDict of batch size [k] with the keys of `rlite.rollout.workflow.trajectory`, `token_rewards` [k, L],
        `sequence_index` [k] from 0, `num_turns` [k], and `rewards` [k], the sum of the token rewards of all rows.
    """
    rows, count = pad_trajectories([history.row() for history in histories]).exclude("group_ids"), len(histories)
    reward = math.fsum(reward for history in histories for reward in history.rewards)
    rows["sequence_index"] = torch.arange(count)
    rows["num_turns"] = torch.full((count,), num_turns)
    return rows.update(of_trajectory(count, rewards=reward))


class Transcript:
    """The sequences of one episode without branches. Tokens that were generated are never tokenised again.

        begin ──> generate ──> read ──> generate ──> ...      one sequence
                                └──> begin ──> generate ...   history was rewritten: another sequence

    Args:
        prompt: the tokens that the first sequence begins with.
        max_length: tokens of one sequence at which generation stops; None means the engine's limit.

    Raises:
        DataError: the prompt is empty, or leaves no room for an answer.
    """

    def __init__(self, prompt: Sequence[int], max_length: int | None = None) -> None:
        if max_length is not None and len(prompt) >= max_length:
            raise DataError(f"a prompt has {len(prompt)} tokens: no room for an answer in {max_length}")
        self.max_length = max_length
        self.num_turns = 0
        self._sequences: list[TokenHistory] = []
        self._rid = uuid.uuid4().hex
        self.begin(prompt)

    @property
    def tokens(self) -> list[int]:
        """A copy of the tokens of the current sequence."""
        return list(self._sequences[-1].tokens)

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin another sequence of the same trajectory, because history was rewritten.

        Raises:
            DataError: the prompt is empty.
        """
        if not prompt:
            raise DataError("a prompt has no tokens: there is nothing to go on from")
        self._sequences.append(TokenHistory())
        self.read(prompt)

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens of the prompt, the environment or a tool."""
        self._sequences[-1].read(tokens)

    def write(self, response: LLMResponse) -> None:
        """Append a turn of the model."""
        made = response.output_tokens, response.output_logprobs, response.output_versions
        self._sequences[-1].write(*made, is_truncated=response.stop_reason == "length")
        self.num_turns += 1

    async def generate(self, engine: AsyncInference, gconfig: GenerationHyperparameters) -> LLMResponse | None:
        """Generate and append the model's next turn.

        Returns:
            The turn; None if the sequence has no room for one. Such a sequence counts as truncated, and the tokens that
            it cannot answer are dropped.

        Raises:
            RolloutError: the engine aborts the turn, or writes nothing.
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
        """End the current sequence as truncated, and drop the tokens that the model cannot answer."""
        self._sequences[-1].drop_unanswered()
        if not self._sequences[-1].tokens:
            self._sequences.pop()
        self._sequences[-1].is_truncated = True

    def reward(self, reward: float) -> None:
        """Add the reward of the turn that was written last. Errors are those of `TokenHistory.reward`."""
        self._sequences[-1].reward(reward)

    def trajectory(self, reward: float | None = None, **values: float) -> TensorDict:
        """Return the episode as rows of one trajectory, [k], one for each sequence in which the model has written.

        Args:
            reward: the reward of the episode. If None, `rewards` is the sum of the rewards of turns, and
                `token_rewards` [k, L] has each of them on the last token of its turn.
            values: further columns [k] of the whole trajectory.

        Returns:
            The keys of `join_histories`, and `values`.

        Raises:
            RolloutError: the model has written nothing.
        """
        written = [sequence for sequence in self._sequences if any(sequence.loss_mask)]
        if not written:
            raise RolloutError("the model has written nothing: there is nothing to train on")
        rows = join_histories(written, self.num_turns)
        if reward is not None:
            rows, values = rows.exclude("token_rewards"), {"rewards": reward, **values}
        return rows.update(of_trajectory(len(written), **values))


def continuation(tokenizer: Tokenizer, text: str, response: LLMResponse, limit: int | None = None) -> list[int]:
    """Return the tokens of text after a turn, without a first end token that the model has already written.

    Args:
        tokenizer: the model's tokenizer.
        text: the text that follows the turn.
        response: the turn.
        limit: tokens that fit into the model's context; None does not bound the text.

    Raises:
        TooManyTokens: the text is far longer than `limit` tokens.
    """
    tokens = bounded_tokens(tokenizer, text, limit)
    end = response.output_tokens[-1:]
    is_written = response.stop_reason == "stop" and tokens[:1] == end
    return tokens[1:] if is_written and not tokenizer.decode(end, skip_special_tokens=True) else tokens


def check_turn_discount(turn_discount: float) -> None:
    """Check that a discount is in [0, 1].

    Raises:
        ConfigError: it is not.
    """
    if not 0 <= turn_discount <= 1:
        raise ConfigError(f"turn_discount={turn_discount!r}: expected a number in [0, 1]")
