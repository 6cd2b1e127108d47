"""Time until a page of `rlite view` can be used, in headless Chromium, on a record of 10,000 rollouts of 2,000 tokens.

    python -m benchmarks.viewer [--rollouts 10000 --tokens 2000 --steps 125 --events 2000000]

Full hundreds of steps are merged, as a run merges them, and the trace has as many events as a trace may have. Each
page is opened from another page, five times; the time ends when it is drawn. Two times are printed apart: the first
page of a server that has just been started, and the first timeline, for which the server reads the trace while other
pages are answered. Needs Playwright and Chromium. Exits with 1 if a page takes a second, a rollout 0.3 seconds, or the
first timeline 4 seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pyarrow as pa

from rlite.observability.trace import MAX_EVENTS
from rlite.services.record.writer import compact, write_table
from tests.browser.chromium import Browser, browser
from tests.recorded_run import EVENTS_OF_A_STEP, Shape, metrics_of, step_tables, write_config, write_trace
from tests.view_server import serving

TOKENS_OF_A_THOUGHT = 12
SAMPLES = 10
REPEATS = 5
FIRST_TIMELINE = "first timeline"
MAX_PAGE_S, MAX_SAMPLE_S, MAX_FIRST_TIMELINE_S = 1.0, 0.3, 4.0
PAGES = {
    "overview": "#/overview",
    "rollouts": "#/rollouts?step={step}",
    "compare": "#/compare?item=countdown-0",
    "timeline": "#/timeline",
    "ledger": "#/ledger",
}
SAMPLE_PAGES = {
    "sample": "#/sample?step={step}&group={group}&sample=3",
    "sample, tokens": "#/sample?step={step}&group={group}&sample=3&tab=tokens",
    "sample, side by side": "#/sample?step={step}&group={group}&sample=3&tab=siblings",
}


def write(folder: Path, rollouts: int, tokens: int, steps: int, events: int) -> tuple[int, Shape]:
    """Write the run. Every step has the rollouts of the first, under other numbers."""
    groups = rollouts // steps // SAMPLES
    shape = Shape(steps, groups, SAMPLES, tokens // TOKENS_OF_A_THOUGHT, share_of_tokens=1.0)
    tables = step_tables(1, shape)
    for step in range(1, steps + 1):
        for kind, table in zip(("rows", "tokens"), tables, strict=True):
            write_table(folder, "train", step, kind, moved(table, step, groups))  # type: ignore[arg-type]
    compact(folder, before=steps + 1)
    write_config(folder, shape, 1e-6)
    lines = (f"{metrics_of(step, shape)}".replace("'", '"') for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    write_trace(folder / "trace.json", events // EVENTS_OF_A_STEP)
    return sum(map(len, tables[1]["ids"].to_pylist())) // len(tables[1]), shape


def moved(table: pa.Table, step: int, groups: int) -> pa.Table:
    numbers = pa.array([number + (step - 1) * groups for number in table["group"].to_pylist()], pa.int64())
    table = table.set_column(0, table.schema.field("step"), pa.array([step] * len(table), pa.int32()))
    return table.set_column(1, table.schema.field("group"), numbers)


def times(chromium: Browser, url: str, shape: Shape) -> dict[str, list[float]]:
    page = chromium.page()
    began = time.perf_counter()
    page.goto(url)
    chromium.wait_until_shown(page, "")
    found = {"first page of a new server": [time.perf_counter() - began]}
    began = time.perf_counter()
    page.evaluate("location.hash = '#/timeline'")
    chromium.wait_until_shown(page, "#/timeline")
    found[FIRST_TIMELINE] = [time.perf_counter() - began]
    for repeat in range(REPEATS):
        for number, (name, address) in enumerate((PAGES | SAMPLE_PAGES).items()):
            step = 1 + (repeat * shape.steps // REPEATS + number) % shape.steps  # which no page has shown before
            place = address.format(step=step, group=(step - 1) * shape.groups + repeat)
            began = time.perf_counter()
            page.evaluate("address => { location.hash = address; }", place)
            chromium.wait_until_shown(page, place)
            found.setdefault(name, []).append(time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=125)
    parser.add_argument("--events", type=int, default=MAX_EVENTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mean, shape = write(Path(folder), options.rollouts, options.tokens, options.steps, options.events)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        print(
            f"{options.rollouts} rollouts of {mean} tokens in {options.steps} steps, {options.events} events of a trace"
        )
        print(f"{size / 1e6:.0f} MB")
        with browser() as chromium, serving([folder]) as url:
            found = times(chromium, url, shape)
    limits = {FIRST_TIMELINE: MAX_FIRST_TIMELINE_S, **dict.fromkeys(SAMPLE_PAGES, MAX_SAMPLE_S)}
    is_slow = False
    for name, seconds in found.items():
        limit = limits.get(name, MAX_PAGE_S)
        is_slow |= median(seconds) > limit
        print(f"{name:28} {median(seconds):.3f} s, at most {max(seconds):.3f} s   (limit {limit} s)")
    sys.exit(is_slow)


if __name__ == "__main__":
    main()
