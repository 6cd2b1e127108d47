"""Rows of the record of an evaluation, made of its episodes; and samples, made of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from tensordict import TensorDict

from rlite.errors import DataError, writing
from rlite.evaluation.episodes import EndedEpisode
from rlite.evaluation.samples import Sample
from rlite.evaluation.scores import measured, score_column
from rlite.observability.record.files import all_files, write_table
from rlite.observability.record.schema import ROWS, TOKENS
from rlite.rollout.collector.status import status_of
from rlite.rollout.record.tables import SEPARATOR, make_tables
from rlite.rollout.record.texts import TokenTexts

Row = dict[str, Any]
"""a row of ROWS, whose `tokens` are rows of TOKENS; plain values, which JSON keeps"""


def row_of(episode: EndedEpisode, item: str, texts: TokenTexts, has_tokens: bool) -> Row:
    """Return the row of an episode. The columns of its sample exist even if the record cannot read the trajectory.

    Args:
        episode: has ended.
        item: id of its data item.
        texts: decodes its sequences.
        has_tokens: keep the tokens, too.

    Raises:
        DataError: `scores` or `rewards` of the trajectory is missing, or not [N].
    """
    place, group = episode.place, episode.group
    trajectory = group.episodes[0].trajectory
    own = {} if trajectory is None else _sample_columns(trajectory)
    status = "evaluated" if episode.has_succeeded else status_of(episode.reason, episode.error)
    ended = replace(group.ended(status, episode.reason), group=place.item, item=item)
    tables = make_tables(0, [ended], texts, {0})
    (row,) = tables["rows"].to_pylist()
    row |= own
    return row | {"tokens": tables["tokens"].to_pylist()} if has_tokens else row


def _sample_columns(trajectory: TensorDict) -> Row:
    """Return the columns of a row that its sample needs.

    Raises:
        DataError: `scores` or `rewards` is missing, or not [N].
    """
    made = measured(trajectory)
    column = {"scores": "score", "rewards": "reward"}[score_column(trajectory)]
    truncated = {"truncated": made["truncated"]} if "truncated" in trajectory else {}
    return {column: made["score"], "response_tokens": made["length"], **truncated}


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
        failed_attempts=tuple(filter(None, (row.get("failed_attempts") or "").split(SEPARATOR))),
        redrawn=row.get("redrawn") or "",
    )


def write_record(folder: Path, name: str, rows: Iterable[Row]) -> None:
    """Write the record of an evaluation, in the order of items and samples. A former record of the name is replaced.

    Each file is replaced at once, so that a reader finds the former record or this one.

    Args:
        folder: holds `record/`.
        name: name of the evaluation.
        rows: rows of all samples of the evaluation.

    Raises:
        DataError: a value has another type than its column. The former record is left.
        StorageError: a file cannot be written.
    """
    ordered = sorted(rows, key=lambda row: (row["group"], row["sample"]))
    tokens = [own for row in ordered for own in row.get("tokens", ())]
    try:
        table = pa.Table.from_pylist([_with_pairs(row) for row in ordered], schema=ROWS)
        table_of_tokens = pa.Table.from_pylist(tokens, schema=TOKENS)
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(f"the samples of {name} cannot be recorded, a value is damaged: {error}") from error
    written = [write_table(folder, source_of(name), 0, "rows", table)]
    if tokens:
        written.append(write_table(folder, source_of(name), 0, "tokens", table_of_tokens))
    remove_record(folder, name, keep=written)


def remove_record(folder: Path, name: str, keep: Collection[Path] = ()) -> None:
    """Remove the record of an evaluation.

    Args:
        folder: holds `record/`.
        name: name of the evaluation.
        keep: files that stay.

    Raises:
        StorageError: a file cannot be removed.
    """
    for file in all_files(folder):
        if file.source == source_of(name) and file.path not in keep:
            with writing(file.path):
                file.path.unlink(missing_ok=True)


def source_of(name: str) -> str:
    """Return the source in the record of an evaluation."""
    return f"eval.{name}"


def _with_pairs(row: Row) -> Row:
    """Return a row whose maps have pairs again, which JSON does not tell from lists."""
    maps = {name: row[name] for name in ("reward_parts", "data") if row.get(name) is not None}
    return row | {name: [(key, value) for key, value in pairs] for name, pairs in maps.items()}
