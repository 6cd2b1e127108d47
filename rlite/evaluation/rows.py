"""Rows of the record of an evaluation, made of its episodes; and samples, made of rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlite.batch import check_one_per_row
from rlite.evaluation.episodes import EndedEpisode
from rlite.evaluation.samples import Sample
from rlite.observability.record.files import write_table
from rlite.observability.record.schema import ROWS, TOKENS
from rlite.rollout.collector.status import status_of
from rlite.rollout.record.tables import make_tables
from rlite.rollout.record.texts import TokenTexts

Row = dict[str, Any]
"""a row of ROWS, whose `tokens` are rows of TOKENS; plain values, which JSON keeps"""


def row_of(episode: EndedEpisode, item: str, texts: TokenTexts, has_tokens: bool) -> Row:
    """Return the row of an episode.

    Args:
        episode: has ended.
        item: id of its data item.
        texts: decodes its sequences.
        has_tokens: keep the tokens, too.

    Raises:
        DataError: `scores` or `rewards` of the trajectory is missing, or not [N].
    """
    place, group = episode.place, episode.group
    if (trajectory := group.episodes[0].trajectory) is not None:
        check_one_per_row(trajectory, "scores" if "scores" in trajectory else "rewards")
    status = "evaluated" if episode.has_succeeded else status_of(episode.reason, episode.error)
    ended = replace(group.ended(status, episode.reason), group=place.item, item=item, first_sample=place.sample)
    tables = make_tables(0, [ended], texts, {0})
    (row,) = tables["rows"].to_pylist()
    return row | {"tokens": tables["tokens"].to_pylist()} if has_tokens else row


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
    """Return a row whose maps have pairs again, which JSON does not tell from lists."""
    maps = {name: row[name] for name in ("reward_parts", "data") if row.get(name) is not None}
    return row | {name: [(key, value) for key, value in pairs] for name, pairs in maps.items()}
