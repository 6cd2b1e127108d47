"""Recording of a session: the turns that its model has read and written, and their rewards.

turn 1 ─── turn 2 ─── turn 3        a child's prompt begins with its parent's prompt and output, token for token
      └─── turn 4                   another continuation of turn 1
turn 5                              rewritten history, or another conversation
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDict

from rlite.data.chat.forms import Message
from rlite.data.packs import TokenHistory
from rlite.data.routing import ROUTED
from rlite.errors import ConfigError, DataError, RolloutError
from rlite.rollout.conversation import check_turn_discount
from rlite.rollout.joined import join_histories, pad_trajectories
from rlite.rollout.rewards.score import as_number
from rlite.rollout.workflow import of_trajectory
from rlite.types import StopReason, TokenChunk

Style = Literal["individual", "concat"]


@dataclass(eq=False, repr=False, kw_only=True)
class Turn:
    """One answer of the model. `logprobs` and `versions` have one value per output token, `kept_ids` one or none."""

    id: str
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)
    """the ids among which each token was sampled, if the request truncated"""
    routed_experts: list[list[bytes]] = field(default_factory=list)
    """the experts that were chosen for the tokens, if the run replays them; see `rlite.data.routing`"""
    finish_reason: StopReason = "abort"
    parent: Turn | None = None
    """the turn whose prompt and output the prompt begins with"""
    messages: Sequence[Message] | None = None
    """the conversation that was asked; None for a prompt that is a text"""
    answer: Message | None = None
    """the message that was returned; None if there was none"""
    tools: Any = None
    prompt_text: str = ""
    """the text of `prompt_ids`, as the template renders it"""
    text: str = ""
    """the text that was returned, including calls of tools"""
    stop_text: str = ""
    """text after it, from the stop string on that ended the answer, without an end token; "" if something else did"""
    end_ids: Collection[int] = ()
    """tokens that end an answer, beside the tokenizer's special tokens"""
    reward: float | None = None
    """the reward of this turn alone"""
    is_aborted: bool = False
    """the client has not received the whole answer: it left, or the engine gave up"""

    def __repr__(self) -> str:
        state = "aborted" if self.is_aborted else self.finish_reason
        return f"<Turn {self.id}: {len(self.prompt_ids)} + {len(self.output_ids)} tokens, {state}>"

    @property
    def sequence(self) -> list[int]:
        """The tokens of the prompt and of the output."""
        return self.prompt_ids + self.output_ids

    def take(self, chunks: Sequence[TokenChunk]) -> None:
        """Append chunks of the engine to the output."""
        for chunk in chunks:
            self.output_ids += chunk.token_ids
            self.logprobs += chunk.logprobs
            self.versions += [chunk.version] * len(chunk.token_ids)
            self.kept_ids += chunk.extras.get("kept_ids", ())
            self.routed_experts += chunk.extras.get(ROUTED, ())
            self.finish_reason = chunk.finish_reason or self.finish_reason


@dataclass(eq=False)
class Recording:
    """The turns of one session, oldest first, and their rewards."""

    turns: list[Turn] = field(default_factory=list)
    turn_discount: float | None = None
    """set by `apply_reward_discount`"""

    def completed(self) -> list[Turn]:
        """Return the turns that were not aborted."""
        return [turn for turn in self.turns if not turn.is_aborted]

    def turn(self, interaction_id: str) -> Turn:
        """Return a turn by its id.

        Raises:
            DataError: no turn has the id. The error names the latest ids.
        """
        for turn in self.turns:
            if turn.id == interaction_id:
                return turn
        known = ", ".join(turn.id for turn in self.turns[-8:]) or "none yet"
        raise DataError(f"no interaction has the id {interaction_id!r}; the latest are: {known}")

    def set_reward(self, interaction_id: str, reward: float) -> None:
        """Set the reward of a turn: a finite number, or an array or tensor of one element.

        Raises:
            DataError: the turn is unknown or aborted, or the reward is not a finite number.
            RolloutError: `apply_reward_discount` was called before.
        """
        turn = self.turn(interaction_id)
        if turn.is_aborted:
            raise DataError(f"interaction {interaction_id!r} was aborted: it has no reward")
        if (number := as_number(reward)) is None:
            raise DataError(f"the reward of interaction {interaction_id!r} is {reward!r}; expected a finite number")
        self._check_open("set_reward")
        turn.reward = number

    def set_last_reward(self, reward: float) -> None:
        """Set the reward of the latest turn.

        Raises:
            DataError: the reward is not a finite number.
            RolloutError: there is no turn, or `apply_reward_discount` was called before.
        """
        completed = self.completed()
        if not completed:
            raise RolloutError("the agent has no completed interaction to reward: it has asked the model for nothing")
        self.set_reward(completed[-1].id, reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Let earlier turns share in later rewards: worth of a turn = its reward + discount x worth of the next turn.

        Raises:
            ConfigError: the discount is not in [0, 1].
            RolloutError: this is the second call.
        """
        check_turn_discount(turn_discount)
        self._check_open("apply_reward_discount")
        self.turn_discount = turn_discount

    def shares(self) -> dict[Turn, float]:
        """Return the share of each turn in the worth of the session: its reward, discounted by the turns before it."""
        discount = 1.0 if self.turn_discount is None else self.turn_discount
        return {turn: discount**index * (turn.reward or 0.0) for index, turn in enumerate(self.completed())}

    def worths(self) -> dict[Turn, float]:
        """Return the worth of each turn: its reward and, with a discount, the worth of later turns."""
        worths: dict[Turn, float] = {}
        following = 0.0
        for turn in reversed(self.completed()):
            worths[turn] = following = (turn.reward or 0.0) + (self.turn_discount or 0.0) * following
        return worths

    def has_reward(self) -> bool:
        """Return whether any completed turn has a reward."""
        return any(turn.reward is not None for turn in self.completed())

    def _check_open(self, what: str) -> None:
        if self.turn_discount is not None:
            raise RolloutError(f"{what}: the rewards of this session were discounted before, which is final")


class RecordingOwner:
    """Base of a session and of its clients, which reward and export the session's recording."""

    recording: Recording

    def set_reward(self, interaction_id: str, reward: float) -> None:
        """Set the reward of the answer with this id; see `Recording.set_reward`.

        The id is the response's. In a response with several choices it is `ID:INDEX`.
        """
        self.recording.set_reward(interaction_id, reward)

    def set_last_reward(self, reward: float) -> None:
        """Set the reward of the latest answer."""
        self.recording.set_last_reward(reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Share the rewards of later answers with earlier ones; see `Recording.apply_reward_discount`."""
        self.recording.apply_reward_discount(turn_discount)

    def export(self, style: Style = "concat", include_aborted: bool = False) -> TensorDict:
        """Return the trainable data; see `rlite.services.endpoint.recording.export`."""
        return export(self.recording, style, include_aborted)


def path(turn: Turn) -> list[Turn]:
    """Return a turn with all turns that it continues, the first turn first."""
    line = [turn]
    while line[-1].parent is not None:
        line.append(line[-1].parent)
    for later, earlier in pairwise(line):
        if later.prompt_ids[: len(earlier.sequence)] != earlier.sequence:
            raise DataError(f"interaction {later.id} does not begin with the tokens of {earlier.id}, its parent")
    return line[::-1]


def check_style(style: str) -> None:
    """Check that a name is a `Style`."""
    if style not in get_args(Style):
        raise ConfigError(f"style={style!r}: expected {' or '.join(map(repr, get_args(Style)))}")


def export(recording: Recording, style: Style = "concat", include_aborted: bool = False) -> TensorDict:
    """Return the trajectory of a session, with the keys of `trajectory()` in `rlite.rollout.workflow`.

    `style`: "individual" makes a row for each turn, its prompt and its output. `rewards` [k] is the worth of the turn,
    and every turn is a member of the group by itself. "concat" makes a row for each line of conversation from its
    beginning to its end. The output of each turn is trained on once: if lines share a beginning, in the first of them.
    All rows are one member of the group. `rewards` [k] is the worth of the session, `token_rewards` [k, L] has the
    share of each turn on its last token, `sequence_index` [k] counts the rows, and `num_turns` [k] the turns. Returns a
    TensorDict of batch size [k].
    """
    check_style(style)
    turns = [turn for turn in recording.turns if turn.output_ids and (include_aborted or not turn.is_aborted)]
    if not turns:
        raise RolloutError("the agent has no completed interaction: there is nothing to train on")
    if style == "individual":
        worths = recording.worths()
        batch = pad_trajectories([_line([turn], {turn: 0.0}).row() for turn in turns]).exclude("group_ids")
        batch["rewards"] = torch.tensor([worths.get(turn, 0.0) for turn in turns], dtype=torch.float32)
        return batch
    shares = recording.shares()
    untrained = {turn: shares.get(turn, 0.0) for turn in turns}
    lines, parents = [], {turn.parent for turn in turns}
    for line in (path(turn) for turn in turns if turn not in parents):
        lines.append(_line(line, {turn: untrained.pop(turn) for turn in line if turn in untrained}))
    batch = join_histories(lines, len(turns))
    # a turn without output has a share, too
    return batch.update(of_trajectory(len(lines), rewards=math.fsum(shares.values())))


def _line(line: Sequence[Turn], rewards: Mapping[Turn, float]) -> TokenHistory:
    """Return the tokens of a line of conversation. The turns that have a reward are trained on; the last one has."""
    history = TokenHistory()
    for turn in line:
        if turn in rewards:
            history.read(turn.prompt_ids[len(history.tokens) :])
            made = turn.output_ids, turn.logprobs, turn.versions, turn.finish_reason
            history.write(*made, turn.kept_ids or None, turn.routed_experts)
            history.reward(rewards[turn])
    return history
