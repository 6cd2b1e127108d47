from __future__ import annotations

import json
from pathlib import Path

from rlite.viewer.metrics import MAX_POINTS, MetricsLog


def test_lines_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    assert not log.refresh()
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert log.refresh()
    assert log.points("loss") == {"steps": [1], "values": [0.5]}
    with path.open("a") as file:
        file.write('ss": 0.25, "kl": "nan"}\n')
    assert log.refresh()
    assert log.points("loss") == {"steps": [1, 2], "values": [0.5, 0.25]}
    assert log.points("kl") == {"steps": [2], "values": [None]}
    assert log.last_step == 2
    assert log.num_torn == 0


def test_a_file_that_a_resumed_run_has_cut_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1}}\n' for step in range(1, 9)))
    log = MetricsLog(path)
    log.refresh()
    shorter = tmp_path / "new"
    shorter.write_text('{"step": 1, "loss": 2}\n')
    shorter.replace(path)
    log.refresh()
    assert log.points("loss") == {"steps": [1], "values": [2.0]}
    assert log.last_step == 1


def test_lines_that_are_no_metrics_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    torn = [b"[1]", b'{"loss": 1}', b"\xff", b'{"step": 1, "loss": "x"}', b'{"step": Infinity}', b'{"step": 1e300}']
    torn.append(b"[" * 100_000)
    path.write_bytes(b"\n".join([*torn, b'{"step": 2, "loss": 3}\n']))
    log = MetricsLog(path)
    log.refresh()
    assert log.num_torn == len(torn)
    assert log.points("loss")["values"] == [3.0]


def test_a_long_series_is_thinned_and_keeps_its_last_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": step}) + "\n" for step in range(5 * MAX_POINTS)))
    log = MetricsLog(path)
    log.refresh()
    steps = log.points("loss")["steps"]
    assert MAX_POINTS / 2 < len(steps) <= MAX_POINTS
    assert steps[-1] == 5 * MAX_POINTS - 1


def test_long_series_keep_the_same_steps_and_rare_values_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    num_steps = 5 * MAX_POINTS + 3
    rows = [{"step": step, "loss": 1} | ({"kl": 2} if step > 77 else {}) for step in range(1, num_steps + 1)]
    for step in range(100, num_steps, 100):
        rows[step - 1]["accuracy"] = step
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = MetricsLog(path)
    log.refresh()
    losses, kls = log.points("loss")["steps"], log.points("kl")["steps"]
    assert losses[-1] == num_steps
    assert kls == [step for step in losses if step > 77]
    assert log.points("accuracy")["steps"] == list(range(100, num_steps, 100))


def test_seconds_of_phases_are_means_of_whole_strides(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "seconds_update": 2.0} for step in range(1, 4 * MAX_POINTS + 1)]
    for row in rows[49::50]:
        row["seconds_evaluate"] = 8.0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = MetricsLog(path)
    log.refresh()
    found = log.phases()
    assert found["stride"] == 4
    assert found["steps"] == list(range(4, 4 * MAX_POINTS + 1, 4))
    assert found["seconds"]["update"] == [2.0] * MAX_POINTS
    assert sum(found["seconds"]["evaluate"]) * 4 == 8.0 * len(rows[49::50])


def test_the_clock_tells_seconds_and_tokens_up_to_each_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "seconds_evaluate": 5.0}, {"step": 1, "seconds": 2.0, "tokens_per_second": 10.0}]
    lines += [{"step": 2, "seconds": 3.0, "seconds_evaluate": 1.0, "tokens_per_second": 100.0}, {"step": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = MetricsLog(path)
    assert log.clock() == {"steps": [], "seconds": [], "tokens": [], "pace": None}
    log.refresh()
    assert log.clock() == {
        "steps": [0, 1, 2],
        "seconds": [5.0, 7.0, 11.0],
        "tokens": [0.0, 20.0, 320.0],
        "pace": 11 / 3,
    }
