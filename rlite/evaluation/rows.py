"""Rows of the record of an evaluation, made of its episodes; and samples, made of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from tensordict import TensorDict

from rlite.batch import NAMED_REWARD, check_one_per_row
from rlite.data.chat.template import Tokenizer
from rlite.evaluation.episodes import EndedEpisode
from rlite.evaluation.samples import Sample
from rlite.observability.record.files import write_table
from rlite.observability.record.schema import ROWS, TOKENS, Status
from rlite.rollout.collector.lost import CANCELLED, kind_of

Row = dict[str, Any]
"""a row of ROWS, whose `tokens` are rows of TOKENS; plain values, which JSON keeps"""
_STATUS: Mapping[str, Status] = {
    "CallTimeout": "timed_out",
    "RewardTimeout": "reward_killed",
    "RewardCrash": "reward_killed",
    "RewardMemory": "reward_killed",
    CANCELLED: "aborted",
}


def row_of(episode: EndedEpisode, item: str, tokenizer: Tokenizer, has_tokens: bool) -> Row:
    """Return the row of an episode.

    Args:
        episode: has ended.
        item: id of its data item.
        tokenizer: the model's.
        has_tokens: keep the tokens, too.

    Raises:
        DataError: `scores` or `rewards` of the trajectory is missing, or not [N].
    """
    row: Row = {
        "step": 0,
        "group": episode.place.item,
        "sample": episode.place.sample,
        "item": item,
        "status": "evaluated",
        "reason": episode.reason,
        "ended": episode.ended,
    }
    if episode.trajectory is None:
        return row | {"status": _STATUS.get(kind_of(episode.reason), "failed")}
    row |= _outcome(episode.trajectory) | {"segments": list(_segments(episode.trajectory, tokenizer))}
    return row | {"tokens": list(_tokens(row, episode.trajectory, tokenizer))} if has_tokens else row


def sample_of(row: Row) -> Sample:
    """Return the sample of a row."""
    return Sample(
        item=row["item"],
        sample=row["sample"],
        score=row.get("reward") if row.get("score") is None else row["score"],
        reason=row["reason"],
        truncated=bool(row.get("truncated")),
        answer=row.get("answer"),
        length=row.get("response_tokens") or 0,
    )


def write_record(folder: Path, name: str, rows: Iterable[Row]) -> None:
    """Write the record of an evaluation, in the order of items and samples.

    Args:
        folder: holds `record/`.
        name: name of the evaluation.
        rows: of all its samples.

    Raises:
        StorageError: a file cannot be written.
    """
    ordered = sorted(rows, key=lambda row: (row["group"], row["sample"]))
    table = pa.Table.from_pylist([_with_pairs(row) for row in ordered], schema=ROWS)
    write_table(folder, f"eval.{name}", 0, "rows", table)
    tokens = [own for row in ordered for own in row.get("tokens", ())]
    if tokens:
        write_table(folder, f"eval.{name}", 0, "tokens", pa.Table.from_pylist(tokens, schema=TOKENS))


def _with_pairs(row: Row) -> Row:
    parts = row.get("reward_parts")
    return row if parts is None else row | {"reward_parts": list(parts.items())}


def _outcome(trajectory: TensorDict) -> Row:
    """Return the columns that a trajectory's numbers give."""
    check_one_per_row(trajectory, "scores" if "scores" in trajectory else "rewards")
    mask = trajectory["loss_mask"]
    versions = trajectory["versions"][mask].tolist() if "versions" in trajectory else []
    parts = {
        name.removeprefix(NAMED_REWARD): float(trajectory[name][0])
        for name in map(str, trajectory.keys())
        if name.startswith(NAMED_REWARD)
    }
    return {
        "reward": _first(trajectory, "rewards"),
        "reward_parts": {name: None if math.isnan(value) else value for name, value in parts.items()},
        "score": _first(trajectory, "scores"),
        "turns": _count(trajectory, "num_turns", default=1),
        "tool_calls": _count(trajectory, "num_tool_calls"),
        "tool_errors": _count(trajectory, "num_tool_errors"),
        "prompt_tokens": int(mask[0].long().argmax()),
        "response_tokens": int(mask.sum()),
        "truncated": bool(trajectory["truncated"].any()) if "truncated" in trajectory else None,
        "version_min": min(versions, default=None),
        "version_max": max(versions, default=None),
    }


def _first(trajectory: TensorDict, key: str) -> float | None:
    """Return the value of the whole trajectory; of single tokens, none."""
    return float(trajectory[key][0]) if key in trajectory and trajectory[key].dim() == 1 else None


def _count(trajectory: TensorDict, key: str, default: int | None = None) -> int | None:
    return int(trajectory[key][0]) if key in trajectory else default


def _sequences(trajectory: TensorDict) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the number of each sequence, and the places of its tokens."""
    for number, mask in enumerate(trajectory["attention_mask"]):
        yield number, mask.nonzero()[:, 0]


def _segments(trajectory: TensorDict, tokenizer: Tokenizer) -> Iterator[dict[str, str]]:
    """Yield the texts of a trajectory by who wrote them."""
    for number, places in _sequences(trajectory):
        ids, mask = trajectory["input_ids"][number, places], trajectory["loss_mask"][number, places]
        is_first = True
        for is_model, run in groupby(zip(ids.tolist(), mask.tolist(), strict=True), key=lambda pair: pair[1]):
            role = "model" if is_model else "prompt" if is_first else "environment"
            yield {"role": role, "text": tokenizer.decode([token for token, _ in run])}
            is_first = False


def _tokens(row: Row, trajectory: TensorDict, tokenizer: Tokenizer) -> Iterator[Row]:
    """Yield a row of TOKENS for each sequence."""
    for number, places in _sequences(trajectory):
        own = {key: trajectory[key][number, places].tolist() for key in ("input_ids", "loss_mask")}
        text, offsets = _decoded(own["input_ids"], tokenizer)
        columns = {
            column: trajectory[key][number, places].tolist()
            for column, key in (("versions", "versions"), ("logprobs", "logprobs"))
            if key in trajectory
        }
        places_of = {key: row[key] for key in ("step", "group", "sample")}
        yield (
            places_of
            | columns
            | {
                "sequence": number,
                "text": text,
                "ids": own["input_ids"],
                "offsets": offsets,
                "mask": own["loss_mask"],
            }
        )


def _decoded(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return the text of tokens, and the place in it at which each token begins.

    Tokens that share a character begin at the same place.
    """
    text, offsets, pending = "", [], list[int]()
    for token in ids:
        offsets.append(len(text))
        pending.append(token)
        if not (piece := tokenizer.decode(pending)).endswith("\ufffd"):
            text, pending = text + piece, []
    return text + (tokenizer.decode(pending) if pending else ""), offsets
