"""Tables of a record: their columns as plain values, their means, and what was lost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlite.evaluation.statistics import clustered_errors

PARTS = "reward_parts"
USED = ("trained", "evaluated")
"""statuses of rollouts that are not in the ledger"""
DIGITS = 5


def columns(table: pa.Table) -> dict[str, list[Any]]:
    """Return the columns of a table of rows. Parts of the reward become columns `reward/NAME`."""
    parts = reward_parts(table) if PARTS in table.column_names else {}
    found = {name: table[name] for name in table.column_names if name != PARTS} | parts
    return {name: plain(column) for name, column in found.items()}


def reward_parts(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Return the parts of the reward by the names of their columns."""
    parts = table[PARTS].combine_chunks()
    if isinstance(parts, pa.ChunkedArray):  # a table without rows
        return {}
    names = sorted(name for name in pc.unique(parts.keys).to_pylist() if name is not None)
    return {f"reward/{name}": pc.map_lookup(parts, query_key=name, occurrence="first") for name in names}


def plain(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Return the values of a column; numbers that are not finite become None."""
    return (pc.if_else(pc.is_finite(column), column, None) if pa.types.is_floating(column.type) else column).to_pylist()


def of_steps(table: pa.Table, steps: Sequence[int]) -> pa.Table:
    """Return the rows of some steps."""
    return table.filter(pc.is_in(table["step"], pa.array(steps, pa.int32())))


def segments_with(text: str, table: pa.Table, role: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield the segments of rollouts in which a text occurs, in upper or lower case.

    Args:
        text: the text to find.
        table: rollouts with their segments.
        role: role of the segments to look at; None: all roles.

    Yields:
        The number of the rollout's row, and the segment's text.
    """
    segments = table["segments"].combine_chunks()
    if not len(segments):
        return
    parts, parents = segments.flatten(), pc.list_parent_indices(segments)
    found = pa.table({"row": parents, "role": parts.field("role"), "text": parts.field("text")})
    hits = found.filter(pc.match_substring(found["text"], text, ignore_case=True))
    hits = hits if role is None else select(hits, role=role)
    for row, segment in zip(hits["row"], hits["text"], strict=True):  # callers stop after some
        yield row.as_py(), segment.as_py()


def select(table: pa.Table, **values: Any) -> pa.Table:
    """Return the rows whose columns have these values."""
    for name, value in values.items():
        table = table.filter(pc.equal(table[name], value))
    return table


def rounded(values: Sequence[Any] | None) -> list[float | None] | None:
    """Return numbers with five digits; None in place of numbers that are not finite."""
    if values is None:
        return None
    return [None if v is None or not math.isfinite(v) else float(f"{v:.{DIGITS}g}") for v in values]


def means_by_step(table: pa.Table, values: pa.ChunkedArray) -> dict[str, list[Any]]:
    """Return mean and standard error of values for each step.

    The standard error is clustered by group, because the rollouts of a group answer one prompt. It is not finite for a
    step with one group.

    Args:
        table: rows.
        values: one number for each row; null does not count.
    """
    data = pa.table({"step": table["step"], "group": table["group"], "value": values}).filter(pc.is_valid(values))
    sums = data.group_by(["step", "group"]).aggregate([("value", "sum"), ("value", "count")]).sort_by("step")
    rows, totals, counts = (sums[name].to_numpy() for name in ("step", "value_sum", "value_count"))
    steps, first, clusters = np.unique(rows, return_index=True, return_counts=True)
    numbers = np.add.reduceat(counts, first)
    with np.errstate(invalid="ignore"):  # a reward is not finite
        means = np.add.reduceat(totals, first) / numbers
        errors = clustered_errors(totals - np.repeat(means, clusters) * counts, first, numbers)
    found = {"steps": steps, "values": means, "errors": errors, "counts": numbers}
    return {name: own.tolist() for name, own in found.items()}


def train_rewards(table: pa.Table) -> pa.ChunkedArray:
    """Return the rewards of training; null for rollouts that the end of the run, or the engine, has aborted."""
    return pc.if_else(pc.equal(table["status"], "aborted"), None, table["reward"])


def known_scores(table: pa.Table) -> pa.ChunkedArray:
    """Return the numbers by which rollouts are evaluated: scores, else rewards; null for a failed episode."""
    return pc.if_else(pc.equal(table["status"], "evaluated"), pc.coalesce(table["score"], table["reward"]), None)


def evaluated_scores(table: pa.Table) -> pa.ChunkedArray:
    """Return the numbers that an evaluation averages.

    A failed episode counts 0, or the lowest number of its step if that is below 0, as in `rlite.evaluation.metrics`.
    """
    known = known_scores(table)
    values = known.to_numpy()
    _, place = np.unique(table["step"].to_numpy(), return_inverse=True)
    lowest = np.zeros(len(values))
    np.fmin.at(lowest, place, values)
    return pa.chunked_array([np.where(known.is_null().to_numpy(), lowest[place], values)])


def statuses_by_step(table: pa.Table) -> dict[str, Any]:
    """Return how often each status occurs in each step."""
    counts = table.group_by(["step", "status"]).aggregate([([], "count_all")]).to_pylist()
    steps = sorted({row["step"] for row in counts})
    found: dict[str, dict[int, int]] = defaultdict(lambda: dict.fromkeys(steps, 0))
    for row in counts:
        found[str(row["status"])][row["step"]] = row["count_all"]
    return {"steps": steps, "counts": {status: [*own.values()] for status, own in found.items()}}


def lost_rows(table: pa.Table) -> pa.Table:
    """Return the rows of the ledger, with the kind of each reason: its text before the first colon."""
    lost = table.filter(pc.invert(pc.is_in(table["status"], pa.array(USED))))
    lost = lost.append_column("seconds", spent_seconds(lost))
    reasons = pc.fill_null(lost["reason"], "")
    kinds = pc.replace_substring_regex(reasons, r"^sample \d+ of the group: ", "")
    kinds = pc.replace_substring_regex(kinds, r"(?s):.*", "")
    return lost.set_column(lost.column_names.index("reason"), "reason", reasons).append_column("kind", kinds)


def spent_seconds(table: pa.Table) -> pa.ChunkedArray:
    """Return the seconds of each rollout that it did not wait for its start."""
    generate, environment, reward = (
        pc.fill_null(table[f"seconds_{name}"], 0.0) for name in ("generate", "environment", "reward")
    )
    return pc.add(pc.add(generate, environment), reward)
