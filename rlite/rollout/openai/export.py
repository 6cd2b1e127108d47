"""From a recording to trajectories: one row for each turn, or one for each line of conversation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from tensordict import TensorDict

from rlite.errors import ConfigError
from rlite.rollout.batch import pad_trajectories
from rlite.rollout.openai.recording import Recording, Turn, leaves, path
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
        rows = [_row([turn], [turn]) for turn in turns]
        batch = pad_trajectories([TensorDict(row, batch_size=[1]) for row in rows]).exclude("group_ids")
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
        line = path(leaf)
        learnt = [turn for turn in line if turn not in trained]
        trained.update(learnt)
        row = _row(line, learnt)
        row["token_rewards"] = torch.zeros(1, len(leaf.sequence))
        for turn in learnt:
            row["token_rewards"][0, len(turn.sequence) - 1] = shares.get(turn, 0.0)
        rows.append(TensorDict(row, batch_size=[1]))
    batch = pad_trajectories(rows).exclude("group_ids")
    count = len(rows)
    batch["sequence_index"] = torch.arange(count)
    batch["num_turns"] = torch.full((count,), len(turns))
    batch["rewards"] = torch.full((count,), math.fsum(shares.values()), dtype=torch.float32)
    return batch


def _row(line: Sequence[Turn], learnt: Sequence[Turn]) -> dict[str, torch.Tensor]:
    """The tokens of the last turn of a line, of which the outputs of `learnt` are trained on."""
    tokens = line[-1].sequence
    loss_mask = torch.zeros(1, len(tokens), dtype=torch.bool)
    logprobs = torch.zeros(1, len(tokens))
    versions = torch.full((1, len(tokens)), -1)
    for turn in learnt:
        written = slice(len(turn.prompt_ids), len(turn.sequence))
        loss_mask[0, written] = True
        logprobs[0, written] = torch.tensor(turn.logprobs)
        versions[0, written] = torch.tensor(turn.versions)
    return {
        "input_ids": torch.tensor([tokens]),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool),
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "versions": versions,
        "truncated": torch.tensor([any(turn.finish_reason == "length" for turn in learnt)]),
    }
