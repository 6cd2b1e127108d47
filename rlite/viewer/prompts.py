"""Prompts of a run: which were tried, by the set that they come from, and the answers to one of them.

The results of an evaluation of finished models, with the prompts on which two of them differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlite.viewer.query import Query
from rlite.viewer.results import columns, known_scores, of_steps, segments_with, select
from rlite.viewer.run import ViewedRun

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
        hits, is_cut = _hits(run, text)
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
    """Return the rows of one prompt, by source.

    Args:
        run: the run.
        query: `item` and its `set`.
    """
    chosen = [source for source in run.record.sources if run.set_of(source) == query.text("set")]
    return [
        {"source": source, "columns": columns(table)}
        for source in chosen
        if (table := select(run.record.table(source), item=query.text("item"))).num_rows
    ]


def prompts(run: ViewedRun) -> dict[tuple[str, str], str]:
    """Return the beginning of prompts by set and item, from the texts of a few steps."""
    found: dict[tuple[str, str], str] = {}
    for source in run.record.sources:
        own = _prompts_of_source(run, source)
        found |= {
            (run.set_of(source), name): text for name, text in zip(own, shortened(list(own.values())), strict=True)
        }
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
    pairs = enumerate(zip(first, last, strict=False))
    length = next((place for place, (one, other) in pairs if one != other), min(len(first), len(last)))
    return first.rfind("\n", 0, length) + 1


def _hits(run: ViewedRun, text: str) -> tuple[dict[tuple[str, str], str], bool]:
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
    groups = rows.group_by(["step", "group"]).aggregate([("item", "min")])
    columns_ = (groups[name].to_pylist() for name in ("step", "group", "item_min"))
    return {(step, group): name for step, group, name in zip(*columns_, strict=True)}


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
    table = run.record.table(source)
    steps = pc.unique(table["step"]).to_pylist()
    chosen = sorted({*steps[:FIRST_STEPS], *steps[-LAST_STEPS:]})
    items_of = _items_of_groups(of_steps(table, chosen))
    found: dict[str, str] = {}
    for texts in run.record.segments(source, chosen):
        first = texts.filter(pc.and_(pc.equal(texts["sample"], 0), pc.is_valid(texts["segments"])))
        for row in first.to_pylist():
            name = items_of.get((row["step"], row["group"]))
            if name is not None and name not in found:
                found[name] = "".join(part["text"] or "" for part in row["segments"] if part["role"] == "prompt")
    return {name: text for name, text in found.items() if text}


MAX_DIFFERENT = 20
"""prompts that differ most"""


def results(run: ViewedRun) -> dict[str, Any] | None:
    """Return metrics by model, the comparison of two models, and the prompts on which they differ; None for training.

    Args:
        run: the run.
    """
    if not run.results.models:
        return None
    names = [name for name in run.results.models if f"eval.{name}" in run.record.sources]
    different = differences(run, names[0], names[1]) if len(names) == 2 else []
    return {
        "models": run.results.models,
        "comparison": run.results.comparison,
        "no_comparison": run.results.no_comparison,
        "different": different,
    }


def differences(run: ViewedRun, first: str, second: str) -> list[dict[str, Any]]:
    """Return the prompts whose mean scores differ most between two models.

    Args:
        run: the run.
        first: name of a model.
        second: name of a model that answered the same questions.
    """
    sources = [f"eval.{name}" for name in (first, second)]
    if len({run.set_of(source) for source in sources}) > 1:
        return []
    scores = [known_scores(run.record.table(source)) for source in sources]
    is_lowest_best = bool((run.results.comparison or {}).get("lower_is_better"))
    worst, worst_of = (max, pc.max) if is_lowest_best else (min, pc.min)
    extremes = [worst_of(own.filter(pc.is_finite(own))).as_py() or 0.0 for own in scores]
    one, other = (_means(run, source, worst(0.0, *extremes)) for source in sources)
    both = [(item, one[item], other[item]) for item in one.keys() & other.keys() if one[item] != other[item]]
    both.sort(key=lambda each: (-abs(each[2] - each[1]), each[0]))
    known = prompts(run) if both else {}
    place = run.set_of(sources[0])
    return [
        {"set": place, "item": item, "prompt": known.get((place, item)), "first": before, "second": after}
        for item, before, after in both[:MAX_DIFFERENT]
    ]


def _means(run: ViewedRun, source: str, wrong: float) -> dict[str, float]:
    """Return the mean score of each item; a failed sample counts `wrong`, as in `rlite.evaluation.compare`."""
    table = run.record.table(source)
    scores = pa.table({"item": table["item"], "score": pc.fill_null(known_scores(table), wrong)})
    means = scores.filter(pc.is_finite(scores["score"])).group_by("item").aggregate([("score", "mean")])
    return dict(zip(means["item"].to_pylist(), means["score_mean"].to_pylist(), strict=True))
