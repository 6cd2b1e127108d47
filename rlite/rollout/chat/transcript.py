"""Transcripts: the tokens that a model reads and writes in one episode, which become a trajectory."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from tensordict import TensorDict

from rlite.data.packs import TokenHistory
from rlite.errors import ConfigError, DataError, EngineAborted, RolloutError
from rlite.rollout.joined import join_histories
from rlite.rollout.workflow import of_trajectory
from rlite.types import AsyncInference, GenerationHyperparameters, LLMRequest, LLMResponse


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
            raise DataError("a prompt has no tokens: there is nothing to continue")
        self._sequences.append(TokenHistory())
        self.read(prompt)

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens of the prompt, the environment or a tool."""
        self._sequences[-1].read(tokens)

    def write(self, response: LLMResponse) -> None:
        """Append a turn of the model."""
        self._sequences[-1].add(response)
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
            is_aborted = response.stop_reason == "abort"
            what, kind = ("aborted", EngineAborted) if is_aborted else ("ended", RolloutError)
            raise kind(f"the engine {what} the completion after {response.output_len} tokens")
        self.write(response)
        return response

    def give_up(self) -> None:
        """End the current sequence as truncated, and drop the tokens that the model cannot answer."""
        self._sequences[-1].drop_unanswered()
        if not self._sequences[-1].tokens:
            self._sequences.pop()
        self._sequences[-1].is_truncated = True

    def reward(self, reward: float) -> None:
        """Add the reward of the turn that was written last.

        Raises:
            RolloutError: the last tokens are not the model's.
        """
        if not self._sequences[-1].loss_mask[-1]:
            raise RolloutError("a reward belongs to a turn of the model, and the last tokens are not the model's")
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


def check_turn_discount(turn_discount: float) -> None:
    """Check that a discount is in [0, 1].

    Raises:
        ConfigError: the discount is out of range.
    """
    if not 0 <= turn_discount <= 1:
        raise ConfigError(f"turn_discount={turn_discount!r}: expected a number in [0, 1]")
