from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlite.observability import trace
from rlite.viewer.trace import BINS, TRACE, TraceLog, flights_of, lanes_of, layout, timeline


def span(name: str, start: float, end: float, pid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6, "pid": pid, "tid": 1}


def flight(name: str, start: float, end: float, number: int = 0) -> list[dict[str, Any]]:
    key = {"cat": "group", "id": f"group-{number}", "name": name}
    return [{"ph": "b", "ts": start * 1e6, **key}, {"ph": "e", "ts": end * 1e6, **key}]


def test_spans_nest_in_lanes() -> None:
    [lane] = lanes_of([span("step", 0, 10), span("wait", 1, 4), span("sync", 4, 5), span("step", 10, 12)])
    assert [(name, depth) for _, _, name, depth in lane.spans] == [("step", 0), ("wait", 1), ("sync", 1), ("step", 0)]


def test_the_busy_share_is_that_of_the_window() -> None:
    events = [span("step", 0, 4), span("step", 8, 10)]
    assert timeline(layout(events))["lanes"][0]["busy"] == pytest.approx(0.6)
    assert timeline(layout(events), 2, 6)["lanes"][0]["busy"] == pytest.approx(0.5)


def test_narrow_neighbours_are_drawn_as_one() -> None:
    events = [span("advance", 0.001 * index, 0.001 * index + 0.0009) for index in range(1000)] + [span("rest", 90, 100)]
    [lane] = timeline(layout(events))["lanes"]
    assert len(lane["spans"]) < 40
    assert lane["spans"][-1][2] == "rest"
    assert "short spans" in lane["spans"][0][2]
    assert len(timeline(layout(events), 0, 0.1)["lanes"][0]["spans"]) > 90


def test_concurrent_work_is_counted_by_stage() -> None:
    events = [*flight("waiting", 0, 5, 1), *flight("running", 5, 10, 1), *flight("running", 0, 10, 2)]
    lanes = {lane["name"]: lane["counts"] for lane in timeline(layout(events))["flights"]}
    assert lanes["group: running"][0] == pytest.approx(1)
    assert lanes["group: running"][-1] == pytest.approx(2)
    assert sum(lanes["group: waiting"]) / BINS == pytest.approx(0.5, abs=0.01)


def test_work_that_a_cut_trace_left_open_lasts_to_its_end() -> None:
    assert flights_of([*flight("running", 1, 2)[:1], span("x", 0, 1), *flight("running", 3, 9, 2)]) == {
        "group: running": [(3.0, 9.0), (1.0, 9.0)]
    }


def test_waiting_is_not_busy_also_inside_of_a_span() -> None:
    events = [span("step", 0, 10), span("wait for rollouts", 1, 5), span("read", 2, 3), span("held", 10, 20)]
    assert timeline(layout(events))["lanes"][0]["busy"] == pytest.approx(6 / 20)


def test_own_times_leave_out_the_spans_inside() -> None:
    times = timeline(layout([span("step", 0, 10), span("update", 1, 5), span("read", 2, 3)]))["times"]
    assert {each["name"]: each["own"] for each in times} == {"step": 6, "update": 3, "read": 1}
    assert sum(each["share"] for each in times) == pytest.approx(1)


def test_the_most_at_once_is_a_whole_number() -> None:
    [drawn] = timeline(layout([*flight("group 1", 0, 0.1), *flight("group 2", 0.05, 100, number=1)]))["flights"]
    assert drawn["most"] == 2


def test_times_are_those_of_the_window() -> None:
    [first, second] = timeline(layout([span("a", 0, 4), span("b", 4, 10)]), 0, 5)["times"]
    assert (first["name"], first["seconds"], first["share"]) == ("a", 4.0, pytest.approx(0.8))
    assert (second["name"], second["seconds"]) == ("b", 1.0)


def test_a_real_trace_is_read_while_it_is_written_and_after(tmp_path: Path) -> None:
    tracer = trace.Tracer(tmp_path / TRACE)
    log = TraceLog(tracer.path)
    tracer.stage("group", 1, "waiting")
    tracer.complete("update", tracer._began, tracer._began + 0.5)
    tracer.flush()
    assert [lane.spans[0][2] for lane in lanes_of(log.events())] == ["update"]
    tracer.finish("group", 1, "consumed")
    tracer.close()
    assert set(flights_of(log.events())) == {"group", "group: waiting"}
    assert log.problems == []


def test_a_torn_trace_shows_the_rest(tmp_path: Path) -> None:
    path = tmp_path / TRACE
    path.write_text("[\n" + json.dumps(span("a", 0, 1)) + ',\n{"ph": "X", "na')
    log = TraceLog(path)
    assert len(log.events()) == 1
    assert log.problems == ["trace.json: 1 line cannot be read"]


HOSTILE = [
    {"ph": "X", "name": "a", "ts": 0, "dur": 1},
    {**span("a", 0, 1), "ts": "inf"},
    {**span("a", 0, 1), "dur": 1e300},
    {**span("a", 0, 1), "pid": {}},
    {"ph": "b", "name": "a", "ts": 0, "pid": 1, "tid": 1},
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0},
]


@pytest.mark.parametrize("event", HOSTILE)
def test_an_event_that_cannot_be_drawn_hides_no_other(tmp_path: Path, event: dict[str, Any]) -> None:
    path = tmp_path / TRACE
    path.write_text("[\n" + ",\n".join(map(json.dumps, [event, span("whole", 0, 1)])))
    log = TraceLog(path)
    [lane] = timeline(log.layout())["lanes"]
    assert [each[2] for each in lane["spans"]] == ["whole"]
    assert log.problems == ["trace.json: 1 line cannot be read"]


def test_a_trace_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / TRACE).mkdir()
    log = TraceLog(tmp_path / TRACE)
    assert log.events() == []
    assert log.problems == ["trace.json: cannot be read: Is a directory"]


def test_an_empty_trace_has_no_lanes() -> None:
    assert timeline(layout([]))["lanes"] == []


def test_a_window_has_the_long_spans_that_began_before_it() -> None:
    events = [span("step", 0, 100), *(span("read", at, at + 0.5) for at in range(99))]
    [lane] = timeline(layout(events), 50, 51)["lanes"]
    assert [name for _, _, name, _ in lane["spans"]] == ["step", "read", "read"]


@pytest.mark.parametrize("limit", ["MAX_EVENTS", "MAX_BYTES"])
def test_newest_events_of_a_long_trace_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    name = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "driver"}}
    events = [name, *(span(f"step {at}", at, at + 1) for at in range(25))]
    lines = [f"{json.dumps(event)},\n" for event in events]
    most = {"MAX_EVENTS": 10, "MAX_BYTES": sum(map(len, lines[-10:]))}
    monkeypatch.setattr(f"rlite.viewer.trace.{limit}", most[limit])
    (tmp_path / TRACE).write_text("[\n" + "".join(lines))
    log = TraceLog(tmp_path / TRACE)
    shown = timeline(log.layout())
    assert [lane["process"] for lane in shown["lanes"]] == ["driver"]
    assert [each[2] for each in shown["lanes"][0]["spans"]] == [f"step {at}" for at in range(15, 25)]
    assert (shown["start"], shown["first"], shown["last"], log.num_left_out) == (15, 15, 25, 15)


def test_lanes_are_kept_until_the_trace_grows(tmp_path: Path) -> None:
    path = tmp_path / TRACE
    path.write_text("[\n" + json.dumps(span("a", 0, 1)) + ',\n{"ph": "X", "na')
    log = TraceLog(path)
    before = log.layout()
    assert log.layout() is before
    with path.open("a") as file:
        file.write(json.dumps(span("b", 1, 2))[15:] + ",\n")
    assert log.refresh()
    assert not log.refresh()
    assert [each[2] for each in log.layout().lanes[0].spans] == ["a", "b"]
    assert log.problems == []
    path.write_text("[\n")
    assert log.layout().lanes == []


def test_a_new_trace_that_has_outgrown_the_old_one_shows_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / TRACE
    path.write_text("[\n" + json.dumps(span("old", 0, 1)) + ",\n")
    log = TraceLog(path)
    assert len(log.events()) == 1
    path.write_text("[\n" + "".join(json.dumps(span(f"new {at}", at, at + 1)) + ",\n" for at in range(9)))
    assert [event["name"] for event in log.events()] == [f"new {at}" for at in range(9)]


def test_traces_of_earlier_sessions_are_named_the_newest_first(tmp_path: Path) -> None:
    for name in (TRACE, "trace.9.json", "trace.1.json", "trace.old.json", "other.2.json"):
        (tmp_path / name).touch()
    assert TraceLog(tmp_path / TRACE).earlier == ["trace.1.json", "trace.9.json"]


@pytest.mark.parametrize("torn", ["nonsense", '{"ph": "X"}, {"ph": "X"}', '{"ph": "X", "name": "a"'])
def test_a_line_that_cannot_be_read_hides_no_other_of_a_long_trace(tmp_path: Path, torn: str) -> None:
    lines = [json.dumps(span(f"step {at}", at, at + 1)) for at in range(2500)]
    lines.insert(1200, torn)
    (tmp_path / TRACE).write_text("[\n" + ",\n".join(lines) + "\n]\n")
    log = TraceLog(tmp_path / TRACE)
    assert [event["name"] for event in log.events()] == [f"step {at}" for at in range(2500)]
    assert log.problems == ["trace.json: 1 line cannot be read"]
