"""The prompts of a run: how their rewards changed, and their texts, which are read as pages ask for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import takewhile
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlite.viewer.run import ViewedRun
from rlite.viewer.tables import columns, of_steps, segments_with

MAX_ITEMS = 500
MAX_PROMPT, MAX_ENDING = 160, 120
"""characters of a prompt, and of the end of an answer, in a list"""
STEPS_AT_ONCE = 8
"""steps of a source whose texts are read together to find prompts"""
MAX_READ = 64_000_000
"""bytes of texts, about, that one question reads to find prompts; the next question reads on"""
MAX_PROMPTS = 5000
"""prompts that are kept"""
MAX_BEGINNING = 4096
"""characters of a prompt that are kept"""
MAX_SEARCHED = 256_000_000
"""bytes of texts, about, that a search reads, and that are read to find prompts: other questions of the pages wait"""
SPECIAL = re.compile(r"<\|[^|>]{1,40}\|>")


def items(run: ViewedRun, text: str) -> dict[str, Any]:
    """Return the prompts of a run, the most changed first, then the most often tried.

    An item is a row's number if its data has no ids, so that training data and each test set have an item 0. The set
    distinguishes them.

    Args:
        run: the run.
        text: a text that the item, or a recorded prompt of it, has.

    Returns:
        The prompts with their mean reward at first and at last, their number, whether the texts of older steps were not
        searched, and whether prompts are left to read: the same question then reads more of them.
    """
    tables = [_of_source(run, source) for source in run.record.sources]
    if not tables:
        return {"items": {}, "number": 0, "is_cut": False, "is_partial": False}
    found = changes(pa.concat_tables(tables))
    hits: dict[tuple[str, str], str] = {}
    is_cut = False
    if text:
        hits, is_cut = _prompt_hits(run, text)
        is_hit = pa.array([place in hits for place in _places(found)], pa.bool_())
        found = found.filter(pc.or_(pc.match_substring(found["item"], text, ignore_case=True), is_hit))
    found = found.append_column("length", pc.utf8_length(found["item"]))  # m2 comes before m10
    found = found.append_column("size", pc.abs(pc.subtract(found["last"], found["first"])))
    order = [("size", "descending"), ("step_count_distinct", "descending"), ("count", "descending")]
    order += [("set", "ascending"), ("length", "ascending"), ("item", "ascending")]
    kept = found.sort_by(order).slice(0, MAX_ITEMS).drop_columns(["length", "size"])
    is_partial = read_prompts(run, set(_places(kept)))
    known = prompts(run)
    texts = [_shown(known.get(place), hits.get(place), text) for place in _places(kept)]
    shown = {**columns(kept), "prompt": texts}
    return {"items": shown, "number": found.num_rows, "is_cut": is_cut, "is_partial": is_partial}


def changes(rows: pa.Table) -> pa.Table:
    """Return the number of rollouts and steps of each item, and its mean reward at first and at last.

    The mean at first is null for an item that was tried once.

    Args:
        rows: set, item, step, place of the source, and reward of rollouts.
    """
    keys = ["set", "item", "step", "source"]
    tries = (
        rows.group_by(keys)
        .aggregate([("reward", "mean"), ([], "count_all")])
        .sort_by([("step", "ascending"), ("source", "ascending")])
    )
    wanted = [("step", "count_distinct"), ("count_all", "sum"), ("step", "max"), ("step", "count")]
    wanted += [("reward_mean", "first"), ("reward_mean", "last")]
    found = tries.group_by(["set", "item"], use_threads=False).aggregate(wanted)
    first = pc.if_else(pc.greater(found["step_count"], 1), found["reward_mean_first"], None)
    kept = found.select(["set", "item", "step_count_distinct", "step_max"]).append_column(
        "count", found["count_all_sum"]
    )
    return kept.append_column("first", first).append_column("last", found["reward_mean_last"])


def prompts(run: ViewedRun) -> dict[tuple[str, str], str]:
    """Return the beginning of the prompts that were read, by set and item."""
    found: dict[tuple[str, str], str] = {}
    for name in {name for name, _ in run.prompts}:
        own = {place: text for place, text in run.prompts.items() if place[0] == name}
        found |= zip(own, shortened(list(own.values())), strict=True)
    return found


def read_prompts(run: ViewedRun, wanted: Set[tuple[str, str]]) -> bool:
    """Read prompts that are not known yet, from the newest steps in which they were tried.

    Args:
        run: the run, which keeps what was read.
        wanted: set and item of prompts.

    Returns:
        True if steps are left that may have more of them.
    """
    end = min(run.prompt_bytes + MAX_READ, MAX_SEARCHED)
    for source in run.record.sources:
        while steps := _steps_to_read(run, source, wanted):
            if run.prompt_bytes >= end or len(run.prompts) > MAX_PROMPTS:
                return end < MAX_SEARCHED and len(run.prompts) <= MAX_PROMPTS
            items_of = _items_of_groups(of_steps(run.record.table(source), steps))
            for table in run.record.segments(source, steps):
                run.prompt_bytes += table.nbytes
                _keep_prompts(run, source, table, items_of)
            run.prompts_read |= {(source, step) for step in steps}
    return False


def _steps_to_read(run: ViewedRun, source: str, wanted: Set[tuple[str, str]]) -> list[int]:
    """Return the newest steps, a few, that were not read and may have prompts that are wanted."""
    missing = [item for name, item in wanted - run.prompts.keys() if name == run.set_of(source)]
    if not missing:
        return []
    table = run.record.table(source)
    steps = pc.unique(table.filter(pc.is_in(table["item"], pa.array(missing)))["step"]).to_pylist()
    return [step for step in sorted(steps, reverse=True) if (source, step) not in run.prompts_read][:STEPS_AT_ONCE]


def _keep_prompts(run: ViewedRun, source: str, table: pa.Table, items_of: Mapping[tuple[int, int], str]) -> None:
    """Keep the prompts of rollouts with texts, one of each group."""
    own = table.filter(pc.and_(pc.equal(table["sample"], 0), pc.is_valid(table["segments"])))
    for row in own.to_pylist():
        name = items_of.get((row["step"], row["group"]))
        text = text_of(row["segments"], "prompt")
        if text and name is not None:
            run.prompts.setdefault((run.set_of(source), name), text[:MAX_BEGINNING])


def text_of(segments: Iterable[Mapping[str, Any]], role: str) -> str:
    """Return the texts of one role."""
    return "".join(part["text"] or "" for part in segments if part["role"] == role)


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
    place = pa.array([run.record.sources.index(source)] * len(table), pa.int32())
    named = table.append_column("set", pa.array([run.set_of(source)] * len(table), pa.string()))
    return named.append_column("source", place)


def ending(text: str) -> str:
    """Return the end of an answer in one short line."""
    line = " ".join(SPECIAL.sub(" ", text[-4 * MAX_ENDING :]).split())
    is_whole = len(text) <= 4 * MAX_ENDING and len(line) <= MAX_ENDING
    return line if is_whole else f"… {line[-MAX_ENDING:]}"
