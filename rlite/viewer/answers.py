"""Answers to the questions of the pages: plain values, from the runs that are shown and from no other file.

Tables of a record become columns of plain values.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby, islice, takewhile
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlite.errors import DataError
from rlite.evaluation.statistics import clustered_errors, wrong_score
from rlite.viewer.metrics import RECENT, advisories, do_equal_rewards_teach_nothing
from rlite.viewer.run import ViewedRun, read_audit
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


def steps_of(run: ViewedRun, source: str) -> list[int]:
    """Return the steps of a source, in their order."""
    return pc.unique(run.record.table(source)["step"]).to_pylist()


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
    reasons = pc.fill_null(lost["reason"], "")
    kinds = pc.replace_substring_regex(reasons, r"^sample \d+ of the group: ", "")
    kinds = pc.replace_substring_regex(kinds, r"(?s):.*", "")
    return lost.set_column(lost.column_names.index("reason"), "reason", reasons).append_column("kind", kinds)


MAX_ITEMS = 500
MAX_PROMPT = 160
"""characters of a prompt in the list"""
FIRST_STEPS, LAST_STEPS = 1, 8
"""steps of a source whose texts are read to find prompts"""
MAX_SEARCHED = 256_000_000
"""bytes of texts that a search reads, about: it keeps all other questions of the pages waiting"""
SPECIAL = re.compile(r"<\|[^|>]{1,40}\|>")


def items(run: ViewedRun, query: Query) -> dict[str, Any]:
    """Return the prompts of a run, the most often tried first.

    An item is a row's number if its data has no ids, so that training data and each test set have an item 0. The set
    distinguishes them.

    Args:
        run: the run.
        query: `text` that the item, or a recorded prompt of it, has.

    Returns:
        The prompts, their number, and whether the texts of older steps were not searched.
    """
    tables = [_of_source(run, source) for source in run.record.sources]
    if not tables:
        return {"items": {}, "number": 0, "is_cut": False}
    wanted = [("step", "count_distinct"), ("step", "count"), ("step", "max"), ("reward", "mean")]
    found = pa.concat_tables(tables).group_by(["set", "item"]).aggregate(wanted)
    hits: dict[tuple[str, str], str] = {}
    is_cut = False
    if text := query.text("text"):
        hits, is_cut = _prompt_hits(run, text)
        is_hit = pa.array([place in hits for place in _places(found)], pa.bool_())
        found = found.filter(pc.or_(pc.match_substring(found["item"], text, ignore_case=True), is_hit))
    found = found.append_column("length", pc.utf8_length(found["item"]))  # m2 comes before m10
    order = [("step_count_distinct", "descending"), ("step_count", "descending")]
    order += [("set", "ascending"), ("length", "ascending"), ("item", "ascending")]
    kept = found.sort_by(order).slice(0, MAX_ITEMS).drop_columns(["length"])
    known = prompts(run)
    texts = [_shown(known.get(place), hits.get(place), text) for place in _places(kept)]
    return {"items": {**columns(kept), "prompt": texts}, "number": found.num_rows, "is_cut": is_cut}


def item(run: ViewedRun, query: Query) -> list[dict[str, Any]]:
    """Return the rows of one prompt, by source."""
    chosen = [source for source in run.record.sources if run.set_of(source) == query.text("set")]
    tables = {source: select(run.record.table(source), item=query.text("item")) for source in chosen}
    return [{"source": source, "columns": columns(table)} for source, table in tables.items() if len(table)]


def prompts(run: ViewedRun) -> dict[tuple[str, str], str]:
    """Return the beginning of prompts by set and item, from the texts of a few steps."""
    found: dict[tuple[str, str], str] = {}
    for source in run.record.sources:
        own = _prompts_of_source(run, source)
        found |= zip([(run.set_of(source), name) for name in own], shortened(list(own.values())), strict=True)
    return found


def shortened(texts: list[str]) -> list[str]:
    """Return prompts in one short line each, without the lines that all of them begin and end with."""
    head = tail = 0
    if len(texts) > 1:
        head = _common_lines(texts)
        tail = _common_lines([text[head:][::-1] for text in texts])
    bodies = (text[head : len(text) - tail] for text in texts)
    return [" ".join(SPECIAL.sub(" ", body[: 4 * MAX_PROMPT]).split())[:MAX_PROMPT] for body in bodies]


def _common_lines(texts: list[str]) -> int:
    """Return the number of characters of the whole lines with which all texts begin."""
    first, last = min(texts), max(texts)  # what these two share, all share
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return first.rfind("\n", 0, sum(1 for _ in shared)) + 1


def _prompt_hits(run: ViewedRun, text: str) -> tuple[dict[tuple[str, str], str], bool]:
    """Find a text in recorded prompts, the newest files of each source first.

    Returns:
        The place in each prompt that has the text, by set and item; and whether older files were left out.
    """
    found: dict[tuple[str, str], str] = {}
    left = MAX_SEARCHED
    for source in run.record.sources:
        items_of = _items_of_groups(run.record.table(source))
        for table in run.record.segments(source, newest_first=True):
            if left <= 0:
                return found, True
            left -= table.nbytes
            for row, prompt in segments_with(text, table, "prompt"):
                name = items_of.get((table["step"][row].as_py(), table["group"][row].as_py()))
                if name is not None and (run.set_of(source), name) not in found:
                    found[run.set_of(source), name] = _around(prompt, text)
    return found, False


def _items_of_groups(rows: pa.Table) -> dict[tuple[int, int], str]:
    """Return the item of each group by step and group."""
    groups = rows.group_by(["step", "group"]).aggregate([("item", "min")]).to_pylist()
    return {(row["step"], row["group"]): row["item_min"] for row in groups}


def _around(prompt: str, text: str) -> str:
    """Return one line of a prompt with a text in it."""
    hit = re.search(re.escape(text), prompt, re.IGNORECASE)
    begin = max(0, hit.start() - MAX_PROMPT // 4) if hit else 0
    return " ".join(SPECIAL.sub(" ", prompt[begin : begin + MAX_PROMPT]).split())


def _shown(known: str | None, hit: str | None, text: str) -> str | None:
    """Return the beginning of a prompt, or the matching excerpt if the beginning lacks the text."""
    return known if hit is None or (known and text.lower() in known.lower()) else hit


def _places(table: pa.Table) -> Iterator[tuple[str, str]]:
    return zip(table["set"].to_pylist(), table["item"].to_pylist(), strict=True)


def _of_source(run: ViewedRun, source: str) -> pa.Table:
    table = run.record.table(source).select(["item", "step", "reward"])
    return table.append_column("set", pa.array([run.set_of(source)] * len(table), pa.string()))


def _prompts_of_source(run: ViewedRun, source: str) -> dict[str, str]:
    table, steps = run.record.table(source), steps_of(run, source)
    chosen = sorted({*steps[:FIRST_STEPS], *steps[-LAST_STEPS:]})
    items_of = _items_of_groups(of_steps(table, chosen))
    found: dict[str, str] = {}
    for texts in run.record.segments(source, chosen):
        for row in texts.filter(pc.and_(pc.equal(texts["sample"], 0), pc.is_valid(texts["segments"]))).to_pylist():
            name = items_of.get((row["step"], row["group"]))
            if name is not None and name not in found:
                found[name] = "".join(part["text"] or "" for part in row["segments"] if part["role"] == "prompt")
    return {name: text for name, text in found.items() if text}


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
    known = prompts(run) if both else {}
    place = run.set_of(sources[0])
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


def _about(run: ViewedRun) -> dict[str, Any]:
    sources = {
        name: {"steps": steps_of(run, name), "rollouts": len(run.record.table(name)), "set": run.set_of(name)}
        for name in run.record.sources
    }
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
    statuses = {"statuses": _statuses(table), "by_step": statuses_by_step(table)}
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


_ANSWERS: list[Callable[[ViewedRun, Query], Any]] = [_overview, _series, _rows, _sample, _group, _search, items, item]
_ANSWERS += [_config, _timeline, _ledger, _ledger_reasons, _ledger_rows]
QUESTIONS = {own.__name__.lstrip("_"): own for own in _ANSWERS}
"""questions about one run"""
OF_TRACE = ("timeline",)
"""questions that read the trace of a run and nothing else"""
