"""Answers to the questions of the pages: plain values, from the runs that are shown and from no other file.

Tables of a record become columns of plain values.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlite.errors import DataError
from rlite.evaluation.statistics import wrong_score
from rlite.viewer.metrics import RECENT, advisories, do_equal_rewards_teach_nothing
from rlite.viewer.prompts import MAX_PROMPT, ending, items, prompts, read_prompts, shortened, text_of
from rlite.viewer.run import ViewedRun, read_audit, read_tinker
from rlite.viewer.tables import (
    PARTS,
    columns,
    evaluated_scores,
    known_scores,
    lost_rows,
    means_by_step,
    of_steps,
    rounded,
    segments_with,
    select,
    spent_seconds,
    statuses_by_step,
    train_rewards,
)
from rlite.viewer.trace import timeline
from rlite.yaml_texts import flat

MAX_WHOLE = 2**63 - 1
"""largest number of a group"""


class UnknownPlace(DataError):
    """A page asks for a run, a source, a step or a rollout that does not exist."""


class Query:
    """Parameters of a question, checked when they are read.

    Args:
        parameters: names and values; a name may come several times.
    """

    def __init__(self, parameters: Iterable[tuple[str, str]]) -> None:
        self._values: defaultdict[str, list[str]] = defaultdict(list)
        for name, value in parameters:
            self._values[name].append(value.encode(errors="replace").decode())  # halves of surrogate pairs

    def texts(self, name: str) -> list[str]:
        """Return all values of a parameter."""
        return self._values[name]

    def text(self, name: str) -> str:
        """Return a parameter; an empty text if it is not given."""
        return next(iter(self.texts(name)), "")

    def whole(self, name: str) -> int:
        """Return a parameter that is a whole number from 0 to MAX_WHOLE.

        Raises:
            DataError: it is missing, or no such number.
        """
        with suppress(ValueError):
            if 0 <= (found := int(self.text(name))) <= MAX_WHOLE:
                return found
        raise DataError(f"{name}: expected a whole number from 0 on, found {self.text(name)[:40]!r}")

    def number(self, name: str) -> float | None:
        """Return a parameter that is a number, or None if it is not given.

        Raises:
            DataError: it is no finite number.
        """
        if not self.texts(name):
            return None
        with suppress(ValueError):
            if math.isfinite(found := float(self.text(name))):
                return found
        raise DataError(f"{name}: expected a number, found {self.text(name)[:40]!r}")


def jsonable(value: Any, not_finite: Callable[[float], Any] = lambda number: None) -> Any:
    """Return a value of which `json.dumps(..., allow_nan=False)` makes JSON. Values of unknown types become texts.

    Args:
        value: any value.
        not_finite: what stands for a number that is not finite; nothing by default.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else not_finite(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item, not_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item, not_finite) for item in value]
    return str(value)


def steps_of(run: ViewedRun, source: str) -> list[int]:
    """Return the steps of a source, in their order."""
    return pc.unique(run.record.table(source)["step"]).to_pylist()


MAX_DIFFERENT = 20
"""prompts that differ most"""


def results(run: ViewedRun) -> dict[str, Any] | None:
    """Return metrics by model, the comparison of two models, and the prompts where they differ; None for training."""
    if not (models := run.results.models):
        return None
    sources = [source for name in models if (source := f"eval.{name}") in run.record.sources]
    is_comparable = len(sources) == 2 and len(set(map(run.set_of, sources))) == 1
    about = {"comparison": run.results.comparison, "no_comparison": run.results.no_comparison}
    return {"models": models, **about, "different": differences(run, sources) if is_comparable else []}


def differences(run: ViewedRun, sources: Sequence[str]) -> list[dict[str, Any]]:
    """Return the prompts whose mean scores differ most between two models.

    Args:
        run: the run.
        sources: sources of two models that answered the same questions.
    """
    scores = [known_scores(run.record.table(source)) for source in sources]
    is_lowest_best = bool((run.results.comparison or {}).get("lower_is_better"))
    worst_of = pc.max if is_lowest_best else pc.min
    extremes = [worst_of(own.filter(pc.is_finite(own))).as_py() or 0.0 for own in scores]
    one, other = (_means(run, source, wrong_score(extremes, is_lowest_best)) for source in sources)
    both = [(item, one[item], other[item]) for item in one.keys() & other.keys() if one[item] != other[item]]
    both.sort(key=lambda each: (-abs(each[2] - each[1]), each[0]))
    place = run.set_of(sources[0])
    read_prompts(run, {(place, item) for item, _, _ in both[:MAX_DIFFERENT]})
    known = prompts(run)
    return [
        {"set": place, "item": item, "prompt": known.get((place, item)), "first": before, "second": after}
        for item, before, after in both[:MAX_DIFFERENT]
    ]


def _means(run: ViewedRun, source: str, wrong: float) -> dict[str, float]:
    """Return the mean score of each item; a failed sample counts `wrong`, as in `rlite.evaluation.metrics`."""
    table = run.record.table(source)
    scores = pa.table({"item": table["item"], "score": pc.fill_null(known_scores(table), wrong)})
    means = scores.filter(pc.is_finite(scores["score"])).group_by("item").aggregate([("score", "mean")])
    return {row["item"]: row["score_mean"] for row in means.to_pylist()}


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
    if (number := query.whole("run")) >= len(runs):
        raise UnknownPlace(f"run={number}: there are {len(runs)} runs")
    return jsonable(QUESTIONS[name](runs[number], query))


def _tinker(run: ViewedRun, query: Query) -> dict[str, Any]:
    return read_tinker(run.folder)


def _about(run: ViewedRun) -> dict[str, Any]:
    sources = {
        name: {"steps": steps_of(run, name), "rollouts": len(run.record.table(name)), "set": run.set_of(name)}
        for name in run.record.sources
    }
    return {
        "name": run.name,
        "folder": str(run.folder),
        "last_step": run.metrics.last_step,
        "is_tinker": run.is_tinker,
        "sources": sources,
        "records": run.can_record,
        "is_evaluation": bool(run.results.models),
        "is_unfinished_evaluation": run.is_unfinished_evaluation,
        "problems": run.problems,
        "notes": run.notes,
        "changed_at": run.changed_at,
        "state": run.state,
        "total_steps": run.total_steps,
        "begun": run.chain.begun,
        "error": (run.chain.ended or {}).get("error", ""),
        "equal_rewards_teach": not do_equal_rewards_teach_nothing(run.folder),
        "live_s": run.live_s,
        "has_trace": run.trace.path.exists(),
        "metrics": sorted(run.metrics.series),
    }


def _series(run: ViewedRun, query: Query) -> dict[str, Any]:
    return {name: run.metrics.points(name) for name in query.texts("names") if name in run.metrics.series}


def _overview(run: ViewedRun, query: Query) -> dict[str, Any]:
    tables = {source: run.record.table(source) for source in run.record.sources}
    scores = {source: (train_rewards if source == TRAIN else evaluated_scores)(own) for source, own in tables.items()}
    means = {source: means_by_step(own, scores[source]) for source, own in tables.items()}
    counted = [TRAIN] if TRAIN in tables else run.evaluated  # evaluations, if there was no training
    table = pa.concat_tables([tables[source] for source in counted]) if counted else run.record.table(TRAIN)
    last = run.metrics.last_step or math.inf  # the rollouts under way at the end are in the step after it
    recent = [step for step in sorted(pc.unique(table["step"]).to_pylist()) if step <= last][-RECENT:]
    lately, is_strict = _statuses(of_steps(table, recent)), do_equal_rewards_teach_nothing(run.folder)
    return {
        "results": results(run),
        "phases": run.metrics.phases(),
        "clock": run.metrics.clock(),
        "sources": means,
        "statuses": _statuses(table),
        "statuses_by_step": statuses_by_step(table),
        "advisories": advisories(run.metrics, lately, len(recent), is_strict),
    }


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
    """Return the answer to the question for one rollout, in values that JSON has."""
    by_name = {name: dict(row.get(name) or ()) for name in (PARTS, "data")}  # they are lists of pairs
    return jsonable({"row": {**row, **by_name}, "sequences": [_sequence(each) for each in sequences]})


def _texts(run: ViewedRun, query: Query) -> dict[str, Any]:
    """Return prompts and data of a step's groups, and the ends of their answers, as far as they are recorded."""
    known = [row for row in run.record.texts(_source(run, query), query.whole("step")) if row["segments"]]
    groups = {row["group"]: row for row in reversed(known)}
    short = shortened([text_of(row["segments"], "prompt") for row in groups.values()])
    about = [
        {
            "group": group,
            "prompt": prompt,
            "data": [[name, (text or "")[:MAX_PROMPT]] for name, text in row["data"] or ()],
        }
        for (group, row), prompt in zip(groups.items(), short, strict=True)
    ]
    answers = [
        {"group": row["group"], "sample": row["sample"], "end": ending(text_of(row["segments"], "model"))}
        for row in known
    ]
    return {"groups": about, "answers": answers}


def _group(run: ViewedRun, query: Query) -> list[dict[str, Any]]:
    source, step, group = _source(run, query), query.whole("step"), query.whole("group")
    found = (select(table, group=group).to_pylist() for table in run.record.segments(source, [step]))
    return sorted(chain.from_iterable(found), key=itemgetter("sample"))


def _search(run: ViewedRun, query: Query) -> dict[str, Any]:
    source, text = _source(run, query), query.text("text")
    tables = run.record.segments(source, [query.whole("step")] if query.texts("step") else None)
    found = list(islice((hit for table in tables for hit in _hits(table, text)), MAX_HITS + 1))
    return {"hits": found[:MAX_HITS], "is_cut": len(found) > MAX_HITS}


def _hits(table: pa.Table, text: str) -> Iterator[dict[str, Any]]:
    """Yield the first hit of each rollout."""
    for row, hits in groupby(segments_with(text, table) if text else (), key=itemgetter(0)):
        place = {name: table[name][row].as_py() for name in ("step", "group", "sample")}
        yield {**place, "snippet": _snippet(next(hits)[1], text)}


def _snippet(found: str, text: str) -> list[str]:
    """Return the text before a hit, the hit, and the text after it."""
    hit = re.search(re.escape(text), found, re.IGNORECASE)
    at, end = hit.span() if hit else (0, 0)
    return [found[max(0, at - CONTEXT) : at], found[at:end], found[end : end + CONTEXT]]


def _items(run: ViewedRun, query: Query) -> dict[str, Any]:
    return items(run, query.text("text"))


def _item(run: ViewedRun, query: Query) -> list[dict[str, Any]]:
    """Return the rows of one prompt, by source."""
    chosen = [source for source in run.record.sources if run.set_of(source) == query.text("set")]
    tables = {source: select(run.record.table(source), item=query.text("item")) for source in chosen}
    return [{"source": source, "columns": columns(table)} for source, table in tables.items() if len(table)]


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
    numbers = {"rollouts": table.num_rows, "lost": lost.num_rows, "num_kinds": kinds.num_rows}
    sums = {"tokens": pc.sum(table["response_tokens"]).as_py(), "seconds": pc.sum(spent_seconds(table)).as_py()}
    statuses = {"statuses": _statuses(table), "by_step": statuses_by_step(table), "sums": sums}
    kinds_shown = _with_steps(kinds.slice(0, MAX_KINDS))
    return {**numbers, **statuses, "kinds": kinds_shown, "audit": read_audit(run.folder)}


def _ledger_reasons(run: ViewedRun, query: Query) -> dict[str, Any]:
    reasons = _amounts(_lost(run, query, "kind"), "reason")
    return {"reasons": _with_steps(reasons.slice(query.whole("offset"), PAGE)), "number": reasons.num_rows}


def _ledger_rows(run: ViewedRun, query: Query) -> dict[str, Any]:
    own = _lost(run, query, "reason")
    return {"columns": columns(own.slice(query.whole("offset"), PAGE)), "number": own.num_rows}


def _lost(run: ViewedRun, query: Query, key: str) -> pa.Table:
    """Return the rows of the ledger that have the status and another value of a query."""
    lost = lost_rows(run.record.table(_source(run, query)))
    return select(lost, status=query.text("status"), **{key: query.text(key)})


def _amounts(lost: pa.Table, key: str) -> pa.Table:
    """Return how many rollouts were lost by status and key, the most first, with their steps."""
    wanted = [([], "count_all"), ("step", "min"), ("step", "max"), ("step", "list"), ("reward", "mean")]
    wanted += [("response_tokens", "sum"), ("seconds", "sum")]
    wanted += [("reason", "min"), ("reason", "count_distinct")] if key == "kind" else []
    order = [("count_all", "descending"), ("status", "ascending"), (key, "ascending")]
    return lost.group_by(["status", key]).aggregate(wanted).sort_by(order)


def _with_steps(amounts: pa.Table) -> list[dict[str, Any]]:
    rows = amounts.to_pylist()
    for row in rows:
        row["steps"] = dict(sorted(Counter(row.pop("step_list")).items()))
    return rows


def _statuses(table: pa.Table) -> dict[str, int]:
    """Return how often each status occurs."""
    return {str(each["values"]): each["counts"] for each in pc.value_counts(table["status"]).to_pylist()}


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


_ANSWERS: list[Callable[[ViewedRun, Query], Any]] = [_overview, _series, _rows, _texts, _sample, _group, _search]
_ANSWERS += [_items, _item, _config, _timeline, _ledger, _ledger_reasons, _ledger_rows, _tinker]
QUESTIONS = {own.__name__.lstrip("_"): own for own in _ANSWERS}
"""questions about one run"""
OF_TRACE = ("timeline",)
"""questions that read the trace of a run and nothing else"""
