"""From a recording to trajectories: one row for each turn, or one for each line of conversation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from tensordict import TensorDict

from rlite.errors import ConfigError
from rlite.rollout.openai.recording import Recording, Turn, leaves, path
from rlite.rollout.trajectories import pad_trajectories, sequence_row
from rlite.rollout.workflow import RolloutError

Style = Literal["individual", "concat"]


def export(recording: Recording, style: Style = "concat", include_aborted: bool = False) -> TensorDict:
    """The trajectory of a session, with the keys of `trajectory()` in `rlite.rollout.workflow`.

    "individual": a row for each turn, its prompt and its output, with `rewards` [k], what the turn is worth: every turn
    is a member of the group by itself.
    "concat": a row for each line of conversation from its beginning to its end. Every turn's output is trained on once:
    where lines share a beginning, in the first of them. All rows are one member of the group: `rewards` [k] is what the
    session is worth, `token_rewards` [k, L] has each turn's share of it on its last token, and `sequence_index` [k]
    counts the rows; `num_turns` [k].

    Raises: RolloutError if there is nothing to export; ConfigError for an unknown style.
    """
    check_style(style)
    turns = [turn for turn in recording.turns if turn.output_ids and (include_aborted or not turn.is_aborted)]
    if not turns:
        raise RolloutError("the agent has no completed interaction: there is nothing to train on")
    if style == "individual":
        worths = recording.worths()
        batch = pad_trajectories([_row(turn, [turn]) for turn in turns]).exclude("group_ids")
        batch["rewards"] = torch.tensor([worths.get(turn, 0.0) for turn in turns], dtype=torch.float32)
        return batch
    return _lines(recording, turns)


def check_style(style: str) -> None:
    """Raise ConfigError unless this is a `Style`."""
    if style not in get_args(Style):
        raise ConfigError(f"style={style!r}: expected {' or '.join(map(repr, get_args(Style)))}")


def _lines(recording: Recording, turns: Sequence[Turn]) -> TensorDict:
    shares = recording.shares()
    rows, trained = [], set[Turn]()
    for leaf in leaves(turns):
        learnt = [turn for turn in path(leaf) if turn not in trained]
        trained.update(learnt)
        row = _row(leaf, learnt)
        row["token_rewards"] = torch.zeros(1, len(leaf.sequence))
        for turn in learnt:
            row["token_rewards"][0, len(turn.sequence) - 1] = shares.get(turn, 0.0)
        rows.append(row)
    batch = pad_trajectories(rows).exclude("group_ids")
    count = len(rows)
    batch["sequence_index"] = torch.arange(count)
    batch["num_turns"] = torch.full((count,), len(turns))
    batch["rewards"] = torch.full((count,), math.fsum(shares.values()), dtype=torch.float32)
    return batch


def _row(leaf: Turn, learnt: Sequence[Turn]) -> TensorDict:
    """The tokens of a line of conversation up to its last turn; the outputs of `learnt` are trained on."""
    tokens = leaf.sequence
    loss_mask, logprobs, versions = [False] * len(tokens), [0.0] * len(tokens), [-1] * len(tokens)
    for turn in learnt:
        written = slice(len(turn.prompt_ids), len(turn.sequence))
        loss_mask[written] = [True] * len(turn.output_ids)
        logprobs[written] = turn.logprobs
        versions[written] = turn.versions
    is_truncated = any(turn.finish_reason == "length" for turn in learnt)
    return sequence_row(tokens, loss_mask, logprobs, versions, is_truncated=is_truncated)
