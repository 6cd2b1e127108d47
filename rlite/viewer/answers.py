"""Answers to the questions of the pages: plain values, from the runs that are shown and from no other file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlite.arguments import flat
from rlite.viewer.advisories import RECENT, advisories
from rlite.viewer.prompts import item, items, results
from rlite.viewer.query import Query, UnknownPlace, jsonable
from rlite.viewer.results import (
    columns,
    evaluated_scores,
    lost_rows,
    means_by_step,
    of_steps,
    plain_row,
    rounded,
    segments_with,
    select,
    statuses_by_step,
    train_rewards,
)
from rlite.viewer.run import ViewedRun
from rlite.viewer.trace import timeline

TRAIN = "train"
MAX_HITS = 200
"""largest number of hits of a search"""
MAX_KINDS = 300
"""largest number of kinds of reasons"""
PAGE = 200
"""rows or reasons of the ledger that are sent together"""
CONTEXT = 60
"""characters on each side of a hit"""
TOKEN_VALUES = ("logprobs", "trainer_logprobs", "advantages", "entropy")


def answer(runs: Sequence[ViewedRun], name: str, query: Query) -> Any:
    """Return the answer to a question, in values that JSON has.

    Args:
        runs: the runs that are shown.
        name: the question.
        query: its parameters; `run` is the number of the run.

    Raises:
        UnknownPlace: there is no such question, run, source or rollout.
        DataError: a parameter has a wrong form.
    """
    if name == "runs":
        return jsonable([_about(run) for run in runs])
    if name not in QUESTIONS:
        raise UnknownPlace(f"no question {name[:40]!r}")
    number = query.whole("run")
    if not 0 <= number < len(runs):
        raise UnknownPlace(f"run={number}: there are {len(runs)} runs")
    return jsonable(QUESTIONS[name](runs[number], query))


def _about(run: ViewedRun) -> dict[str, Any]:
    sources = {}
    for source in run.record.sources:
        table = run.record.table(source)
        steps = pc.unique(table["step"]).to_pylist()
        sources[source] = {"steps": steps, "rollouts": table.num_rows, "set": run.set_of(source)}
    return {
        "name": run.name,
        "folder": str(run.folder),
        "last_step": run.metrics.last_step,
        "sources": sources,
        "records": run.can_record,
        "is_evaluation": bool(run.results.models),
        "is_unfinished_evaluation": run.is_unfinished_evaluation,
        "problems": run.problems,
        "notes": run.notes,
        "changed_at": run.changed_at,
        "live_s": run.live_s,
        "has_trace": run.trace.path.exists(),
        "metrics": sorted(run.metrics.series),
    }


def _series(run: ViewedRun, query: Query) -> dict[str, Any]:
    return {name: run.metrics.points(name) for name in query.texts("names") if name in run.metrics.series}


def _overview(run: ViewedRun, query: Query) -> dict[str, Any]:
    tables = {source: run.record.table(source) for source in run.record.sources}
    means = {
        source: means_by_step(table, train_rewards(table) if source == TRAIN else evaluated_scores(table))
        for source, table in tables.items()
    }
    counted = [TRAIN] if TRAIN in tables else run.evaluated  # evaluations, if there was no training
    table = pa.concat_tables([tables[source] for source in counted]) if counted else run.record.table(TRAIN)
    recent, num_steps = _recent(run, table)
    return {
        "results": results(run),
        "phases": run.metrics.phases(),
        "sources": means,
        "statuses": dict(_value_counts(table["status"])),
        "statuses_by_step": statuses_by_step(table),
        "advisories": advisories(run.metrics, dict(_value_counts(recent["status"])), num_steps, run.config),
    }


def _recent(run: ViewedRun, table: pa.Table) -> tuple[pa.Table, int]:
    """Return the rows of the last finished steps that have rows, and the number of these steps.

    A run that ends records the rollouts under way in the step after its last.
    """
    steps = sorted(pc.unique(table["step"]).to_pylist())
    last = run.metrics.last_step
    chosen = [step for step in steps if not last or step <= last][-RECENT:]
    return of_steps(table, chosen), len(chosen)


def _rows(run: ViewedRun, query: Query) -> dict[str, Any]:
    source, step = _source(run, query), query.whole("step")
    rows = select(run.record.table(source), step=step)
    wanted = [name for name in query.texts("columns") if name in rows.column_names]
    return {"columns": columns(rows.select(wanted) if wanted else rows)}


def _sample(run: ViewedRun, query: Query) -> Any:
    source, step = _source(run, query), query.whole("step")
    place = query.whole("group"), query.whole("sample")
    rows = run.record.rollouts(source, step, place)
    if not rows:
        raise UnknownPlace(f"{source}: no rollout {place[1]} in group {place[0]} of step {step}")
    return sample_answer(rows[0], run.record.tokens(source, step, place))


def sample_answer(row: Mapping[str, Any], sequences: Iterable[Mapping[str, Any]]) -> Any:
    """Return the answer to the question for one rollout, in values that JSON has.

    Args:
        row: the rollout's row.
        sequences: its recorded sequences.
    """
    return jsonable({"row": plain_row(row), "sequences": [_sequence(each) for each in sequences]})


def _group(run: ViewedRun, query: Query) -> list[dict[str, Any]]:
    source, step, group = _source(run, query), query.whole("step"), query.whole("group")
    found = [
        row
        for table in run.record.segments(source, [step])
        for row in table.filter(pc.equal(table["group"], group)).to_pylist()
    ]
    return sorted(found, key=lambda row: row["sample"])


def _search(run: ViewedRun, query: Query) -> dict[str, Any]:
    source, text = _source(run, query), query.text("text")
    steps = [query.whole("step")] if query.has("step") else None
    hits: list[dict[str, Any]] = []
    for table in run.record.segments(source, steps):
        for hit in _hits(table, text):
            if len(hits) == MAX_HITS:
                return {"hits": hits, "is_cut": True}
            hits.append(hit)
    return {"hits": hits, "is_cut": False}


def _hits(table: pa.Table, text: str) -> Iterator[dict[str, Any]]:
    """Yield the first hit of each rollout."""
    told: set[int] = set()
    for row, found in segments_with(text, table) if text else ():
        if row not in told:
            told.add(row)
            place = {name: table[name][row].as_py() for name in ("step", "group", "sample")}
            yield {**place, "snippet": _snippet(found, text)}


def _snippet(found: str, text: str) -> list[str]:
    """Return the text before a hit, the hit, and the text after it."""
    hit = re.search(re.escape(text), found, re.IGNORECASE)
    at, end = hit.span() if hit else (0, 0)
    return [found[max(0, at - CONTEXT) : at], found[at:end], found[end : end + CONTEXT]]


def _config(run: ViewedRun, query: Query) -> Any:
    return jsonable(dict(flat(run.config)), not_finite=str)


def _timeline(run: ViewedRun, query: Query) -> dict[str, Any] | None:
    trace = run.trace.layout()
    if not trace.lanes and not trace.flights:
        return None
    found = timeline(trace, query.number("start"), query.number("end"))
    return {**found, "num_left_out": run.trace.num_left_out, "earlier": run.trace.earlier}


def _ledger(run: ViewedRun, query: Query) -> dict[str, Any]:
    table = run.record.table(_source(run, query))
    lost = lost_rows(table)
    kinds = _amounts(lost, "kind")
    return {
        "rollouts": table.num_rows,
        "lost": lost.num_rows,
        "statuses": dict(_value_counts(table["status"])),
        "by_step": statuses_by_step(table),
        "kinds": _with_steps(kinds.slice(0, MAX_KINDS)),
        "num_kinds": kinds.num_rows,
    }


def _ledger_reasons(run: ViewedRun, query: Query) -> dict[str, Any]:
    lost = lost_rows(run.record.table(_source(run, query)))
    reasons = _amounts(select(lost, status=query.text("status"), kind=query.text("kind")), "reason")
    return {"reasons": _with_steps(reasons.slice(query.whole("offset"), PAGE)), "number": reasons.num_rows}


def _ledger_rows(run: ViewedRun, query: Query) -> dict[str, Any]:
    table = lost_rows(run.record.table(_source(run, query)))
    own = select(table, status=query.text("status"), reason=query.text("reason"))
    offset = query.whole("offset")
    return {"columns": columns(own.slice(offset, PAGE)), "number": own.num_rows}


def _amounts(lost: pa.Table, key: str) -> pa.Table:
    """Return how many rollouts were lost by status and key, the most first, with their steps."""
    wanted = [([], "count_all"), ("step", "min"), ("step", "max"), ("step", "list"), ("reward", "mean")]
    wanted += [("reason", "min"), ("reason", "count_distinct")] if key == "kind" else []
    order = [("count_all", "descending"), ("status", "ascending"), (key, "ascending")]
    return lost.group_by(["status", key]).aggregate(wanted).sort_by(order)


def _with_steps(amounts: pa.Table) -> list[dict[str, Any]]:
    rows = amounts.drop_columns(["step_list"]).to_pylist()
    for row, steps in zip(rows, amounts["step_list"], strict=True):
        row["steps"] = dict(sorted(Counter(steps.as_py()).items()))
    return rows


def _value_counts(column: pa.ChunkedArray) -> Iterator[tuple[str, int]]:
    for each in pc.value_counts(column).to_pylist():
        yield str(each["values"]), each["counts"]


def _sequence(sequence: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of one sequence, each with its piece of the text."""
    text, offsets = sequence["text"] or "", sequence["offsets"] or []
    ends = [*offsets[1:], len(text)]
    made = {name: sequence[name] for name in ("sequence", "ids", "mask", "versions")}
    made["pieces"] = [text[start:end] for start, end in zip(offsets, ends, strict=False)]
    made["before"] = text[: offsets[0]] if offsets else text
    return made | {name: rounded(sequence[name]) for name in TOKEN_VALUES}


def _source(run: ViewedRun, query: Query) -> str:
    source = query.text("source") or TRAIN
    if source not in run.record.sources:
        raise UnknownPlace(f"source={source[:80]}: the record of {run.name} has {run.record.sources or 'no rows'}")
    return source


QUESTIONS: dict[str, Callable[[ViewedRun, Query], Any]] = {
    "overview": _overview,
    "series": _series,
    "rows": _rows,
    "sample": _sample,
    "group": _group,
    "search": _search,
    "items": items,
    "item": item,
    "config": _config,
    "timeline": _timeline,
    "ledger": _ledger,
    "ledger_reasons": _ledger_reasons,
    "ledger_rows": _ledger_rows,
}
"""questions about one run"""
OF_TRACE = ("timeline",)
"""questions that read the trace of a run and nothing else"""
