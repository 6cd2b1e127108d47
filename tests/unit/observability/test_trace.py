from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlite.observability import stats_tracker, trace
from tests.trace_format import Event, read_trace, rows_of


@pytest.fixture(autouse=True)
def no_trace_is_left() -> Iterator[None]:
    yield
    trace.stop()


def spans_of(events: list[Event], row: str) -> list[Event]:
    (spans,) = (spans for (_, name), spans in rows_of(events).items() if name == row)
    return spans


def test_spans_nest_in_the_row_of_their_thread_and_timings_are_spans(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "trace.json"
    trace.start(path)
    assert trace.is_on()

    def work() -> None:
        for number in range(20):
            with trace.span("outer", number=number, name="any", track=1), trace.span("inner"):
                time.sleep(0.001)

    threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(3)]
    for thread in threads:
        thread.start()

    def update() -> None:
        with trace.span("update"):
            time.sleep(0.01)
            raise KeyError

    with stats_tracker.record_timing("step"), pytest.raises(KeyError):
        update()
    for thread in threads:
        thread.join()
    trace.stop()
    events = read_trace(path)
    for i in range(3):
        spans = spans_of(events, f"worker {i}")
        assert [span["name"] for span in spans] == ["outer", "inner"] * 20
        assert [span["args"]["number"] for span in spans[::2]] == list(range(20))
    step, inside = spans_of(events, "the program")
    assert (step["name"], inside["name"], inside["args"]) == ("step", "update", {"raised": "KeyError"})
    assert 10_000 <= inside["dur"] <= step["dur"], "microseconds"
    assert step["dur"] == pytest.approx(stats_tracker.export()["timeperf/step"] * 1e6, abs=1.0)


def test_tasks_of_one_thread_overlap_and_items_pass_through_stages(tmp_path: Path) -> None:
    trace.start(tmp_path / "trace.json")

    async def episode(number: int) -> None:
        trace.stage("group", number, "running")
        with trace.task("generate", number=number):
            await asyncio.sleep(0.001 * (5 - number))
        trace.stage("group", number, "ready", reward=0.5)

    async def episodes() -> None:
        await asyncio.gather(*map(episode, range(5)))

    for number in range(6):
        trace.stage("group", number, "waiting")
    asyncio.run(episodes())
    for number in range(4):
        trace.finish("group", number, "consumed")
    trace.finish("group", 4, "too old")
    trace.finish("group", 77, "nobody knows it")
    trace.stop()
    events = read_trace(tmp_path / "trace.json")
    lives: dict[str, list[tuple[str, str]]] = {}
    for event in events:
        if event.get("cat") == "group":
            lives.setdefault(event["id"], []).append((event["ph"], event["name"]))
    stages = ["waiting", "running", "ready"]
    for number in range(5):
        inside = [(phase, stage) for stage in stages for phase in "be"]
        name = f"group {number}"
        assert lives[f"group-{number}"] == [("b", name), *inside, ("e", name)]
    reasons = [e["args"]["reason"] for e in events if e["ph"] == "e" and e["name"].startswith("group")]
    assert reasons == ["consumed"] * 4 + ["too old", "the trace ended"]
    assert len({e["id"] for e in events if e.get("cat") == "generate"}) == 5


def test_calls_in_a_workers_row_follow_each_other_with_what_was_timed_in_them(tmp_path: Path) -> None:
    trace.start(tmp_path / "trace.json")
    now = time.perf_counter()
    row = ("train-0", "rank 0")
    trace.complete("first", now, now + 0.5, row, [("inner", now + 0.1, now + 0.2), ("inside", now + 0.1, now + 0.15)])
    trace.complete("second", now + 0.4, now + 0.9, row, [("inner", now + 0.3, now + 0.6)])
    trace.stop()
    spans = rows_of(read_trace(tmp_path / "trace.json"))[row]
    assert [s["name"] for s in spans] == ["first", "inner", "inside", "second", "inner"]
    assert spans[3]["ts"] == pytest.approx(spans[0]["ts"] + spans[0]["dur"]), "it was not busy twice"
    assert spans[4]["dur"] == pytest.approx(1e5)


def test_a_trace_is_bounded_and_says_what_it_left_out(tmp_path: Path) -> None:
    trace.start(tmp_path / "trace.json", max_events=100)
    for number in range(30):
        trace.stage("group", number, "waiting")
    for number in range(200):
        with trace.span("busy", number=number):
            pass
    with trace.task("late"):
        trace.stage("group", 3, "running")
    trace.stop()
    events = read_trace(tmp_path / "trace.json")
    (last,) = (e for e in events if e["ph"] == "i")
    # 60 + 40 events are the first hundred; of the task and of the stage nothing begins
    assert last["args"] == {"num_dropped": 160 + 2}
    assert sum(e["ph"] == "X" for e in events) == 40
    assert len(events) < 100 + 60 + 20


def test_trace_excludes_events_that_began_before_it(tmp_path: Path) -> None:
    trace.start(tmp_path / "first.json")
    stats_tracker.export()
    before = time.perf_counter()
    with stats_tracker.record_timing("timing"), trace.span("span"), trace.task("task"):
        trace.stage("group", 1, "running")
        trace.start(tmp_path / "second.json")
        with trace.task("task"), trace.span("inside"):
            pass
    trace.complete("call", before, time.perf_counter(), ("train-0", "rank 0"))
    trace.finish("group", 1, "consumed")
    trace.stop()
    first, second = (read_trace(tmp_path / name) for name in ("first.json", "second.json"))
    assert [event["name"] for event in first if event["ph"] == "b"] == ["task", "group 1", "running"]
    assert [event["name"] for event in second if event["ph"] != "M"] == ["task", "inside", "task", "the trace ends"]
    assert stats_tracker.export()["timeperf/timing"] > 0


def test_memory_is_bounded_because_events_are_written_in_pieces(tmp_path: Path) -> None:
    tracer = trace.Tracer(tmp_path / "trace.json")
    for _ in range(3 * trace.HELD_EVENTS):
        tracer.instant("tick")
    assert tracer.path.read_text().count("tick") >= 2 * trace.HELD_EVENTS
    tracer.close()
    assert len(read_trace(tracer.path)) == 3 * trace.HELD_EVENTS + 3


def test_trace_of_a_killed_process_lacks_only_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = (
        "import os, signal, sys\n"
        "from rlite.observability import trace\n"
        "assert 'torch' not in sys.modules\n"
        f"trace.start({str(path)!r})\n"
        "for _ in range(10):\n"
        "    with trace.span('step'): pass\n"
        "trace.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    # the format's array may lack its closing bracket, and end in a comma
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert sum(event["ph"] == "X" for event in events) == 10


@pytest.mark.parametrize("num_events", [3, 3 * trace.HELD_EVENTS])
def test_a_full_disk_ends_the_trace_with_one_warning_and_nothing_else(
    num_events: int, caplog: pytest.LogCaptureFixture
) -> None:
    trace.start("/dev/full")
    trace.stage("group", 0, "waiting")
    for number in range(num_events):
        with trace.span("update", number=number), trace.task("reward"):
            trace.stage("group", number, "running")
    assert trace.is_on(), "no other trace replaces what was written"
    trace.stop()
    [warning] = [record.getMessage() for record in caplog.records if record.name == trace.logger.name]
    assert re.search(r"^/dev/full: the trace ends here.* the disk is full.* goes on.* free space", warning)


def test_earlier_traces_are_kept_up_to_a_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    for number in range(trace.MAX_EARLIER + 3):
        trace.start(path)
        trace.instant(f"start {number}")
    followed = path.open()
    trace.start(path)
    trace.stop()
    assert "start 11" in followed.read(), "a reader keeps the file that it follows"
    followed.close()
    held = [path.with_name(f"trace.{number}.json").read_text() for number in range(1, trace.MAX_EARLIER + 1)]
    assert [re.findall("start [0-9]+", text) for text in held] == [[f"start {number}"] for number in range(11, 2, -1)]
    assert len(list(tmp_path.iterdir())) == trace.MAX_EARLIER + 1
    assert caplog.messages == [f"{tmp_path / 'trace.9.json'} is deleted: 9 later traces are kept"] * 3


def test_a_free_place_among_earlier_traces_is_used(tmp_path: Path) -> None:
    for name, text in (("trace.json", "a"), ("trace.1.json", "b"), ("trace.3.json", "c")):
        (tmp_path / name).write_text(text)
    trace.set_aside(tmp_path / "trace.json")
    held = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert held == {"trace.1.json": "a", "trace.2.json": "b", "trace.3.json": "c"}


def test_without_a_trace_a_site_costs_less_than_a_microsecond_or_ten_calls(tmp_path: Path) -> None:
    def nothing(*args: object, **kwargs: object) -> None:
        pass

    def seconds(statement: str) -> float:
        names = {"trace": trace, "nothing": nothing}
        return min(timeit.repeat(statement, timer=time.thread_time, number=1000, repeat=70, globals=names)) / 1000

    limit = max(1e-6, 10 * seconds("nothing()"))  # on a slow machine each call takes longer
    for site in (
        "with trace.span('update'): pass",
        "with trace.task('reward', item=3): pass",
        "trace.stage('group', 17, 'running')",
        "trace.finish('group', 17, 'consumed')",
        "trace.is_on()",
    ):
        assert seconds(site) < limit, site


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["a", "b", "c", "finish"])), max_size=60))
def test_any_order_of_stages_gives_spans_that_nest(tmp_path_factory: pytest.TempPathFactory, moves: list) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace.start(path, max_events=50)
    for number, stage in moves:
        if stage == "finish":
            trace.finish("group", number, "done")
        else:
            trace.stage("group", number, stage)
    trace.stop()
    read_trace(path)
