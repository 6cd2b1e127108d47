from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rlite.errors import ConfigError, StorageError, UnknownOptionError
from rlite.services.console.sinks import (
    JsonlSink,
    MetricSinks,
    Run,
    WandbSink,
    drop_later_lines,
    open_sinks,
    read_metrics,
)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_a_line_of_strict_json_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    sink = JsonlSink(Run(directory=tmp_path / "run"))
    sink.log(1, {"loss": 0.5, "n": 3})
    sink.log(2, {"loss": float("nan"), "top": float("-inf")})
    assert read(sink.path) == [{"step": 1, "loss": 0.5, "n": 3}, {"step": 2, "loss": "nan", "top": "-inf"}]
    with pytest.raises(ConfigError, match="cannot be named 'step'"):
        sink.log(3, {"step": 1.0})
    sink.close()


def test_a_resumed_run_writes_the_file_of_an_undisturbed_one(tmp_path: Path) -> None:
    undisturbed, killed = JsonlSink(Run(directory=tmp_path / "a")), JsonlSink(Run(directory=tmp_path / "b"))
    for step in range(1, 8):
        undisturbed.log(step, {"loss": 1 / step})
    for step in range(1, 6):
        killed.log(step, {"loss": 1 / step})
    killed.close()
    with killed.path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed while it wrote
    JsonlSink(Run(directory=tmp_path / "b")).close()
    assert [row["step"] for row in read(killed.path)] == [1, 2, 3, 4, 5], "only the torn line is dropped"
    resumed = JsonlSink(Run(directory=tmp_path / "b", resume_after=3))
    for step in range(4, 8):
        resumed.log(step, {"loss": 1 / step})
    assert resumed.path.read_bytes() == undisturbed.path.read_bytes()
    undisturbed.close()
    resumed.close()


def test_sinks_are_opened_by_name_and_resume_together(tmp_path: Path) -> None:
    for resume_after in (None, 1):
        sinks = open_sinks(["jsonl"], Run(directory=tmp_path, resume_after=resume_after))
        for step in (1, 2) if resume_after is None else (2, 3):
            sinks.log(step, {"loss": float(step)})
        sinks.close()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    with pytest.raises(UnknownOptionError, match="'tensorbord'; did you mean 'tensorboard'"):
        open_sinks(["jsonl", "tensorbord"], Run(directory=tmp_path))


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_an_absent_package_is_an_error_that_names_its_extra(name: str, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        f"sys.modules[{name!r}] = None\n"
        "from rlite.errors import ConfigError\n"
        "from rlite.services.console.sinks import Run, open_sinks\n"
        f"try: open_sinks(['jsonl', {name!r}], Run(directory=pathlib.Path({str(tmp_path)!r})))\n"
        "except ConfigError as error: print(error)\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert f"pip install 'rlite[{name}]'" in shown
    assert not (tmp_path / "metrics.jsonl").exists(), "nothing is opened when one cannot be"


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = open_sinks(["tensorboard"], Run(directory=tmp_path))
    for step in (1, 2):
        sinks.log(step, {"actor/loss": step / 2})
    sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("actor/loss")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 1.0)]


@pytest.mark.nightly
def test_wandb_shows_a_run_under_its_team_group_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    labels = {"project": "sums", "name": "sums-7", "entity": "our-team", "group": "seeds", "tags": ["grpo", "7b"]}
    sinks = open_sinks(["wandb"], Run(directory=tmp_path, **labels))
    (sink,) = sinks.sinks
    assert isinstance(sink, WandbSink)
    shown = {name: getattr(sink._run, name) for name in labels}
    sinks.close()
    assert shown == labels | {"tags": ("grpo", "7b")}


@pytest.mark.nightly
def test_wandb_goes_on_with_the_run_that_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for resume_after in (None, 1):
        sinks = open_sinks(["wandb"], Run(directory=tmp_path, config={"lr": 1e-3}, resume_after=resume_after))
        sinks.log(1 + (resume_after or 0), {"loss": 0.25})
        sinks.close()
        assert "loss 0.25" in capfd.readouterr().err
    runs = {path.name for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}
    assert len(runs) == 1, "both attempts belong to one run"


def test_trackio_goes_on_with_the_run_that_is_resumed_and_with_no_other_of_its_name(tmp_path: Path) -> None:
    """Folders a and b hold runs of one name. The run in a starts, the run in b starts, both are resumed, c is old."""
    program = (
        "import pathlib, trackio\n"
        "from rlite.services.console.sinks import Run, open_sinks\n"
        "for folder, resume_after in [('a', None), ('b', -1), ('a', 1), ('b', 1), ('c', 2)]:\n"
        "    run = Run(directory=pathlib.Path(folder), project='p', name='r', group='g', resume_after=resume_after)\n"
        "    sinks = open_sinks(['trackio'], run)\n"
        "    sinks.log(1 + max(resume_after or 0, 0), {'loss': 0.5})\n"
        "    sinks.close()\n"
        "names = {folder: pathlib.Path(folder, 'trackio_run_name').read_text() for folder in 'abc'}\n"
        "assert names['a'] == names['c'] == 'r', names\n"
        "assert names['b'].startswith('r-'), names\n"
        "kept = sorted(run.name for run in trackio.Api().runs('p'))\n"
        "assert kept == sorted({*names.values()}), kept\n"
        "assert {run.config['_Group'] for run in trackio.Api().runs('p')} == {'g'}\n"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


class Recorder:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.closed = fails, False

    def log(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        if self.fails:
            raise OSError("disk full")


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open() -> None:
    sinks = [Recorder(), Recorder(fails=True), Recorder()]
    with pytest.raises(OSError, match="disk full"):
        MetricSinks(sinks).close()
    assert all(sink.closed for sink in sinks)


def test_lines_that_are_cut_anywhere_cost_themselves_alone(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    whole = [
        json.dumps({"step": step, "text": "äß\u2028漢"}, ensure_ascii=False).encode() + b"\n" for step in range(1, 5)
    ]
    for end in range(1, len(whole[2])):
        path.write_bytes(b"".join([*whole[:2], whole[2][:end]]))
        drop_later_lines(path, 9)
        assert path.read_bytes() == b"".join(whole[:2])
    path.write_bytes(b"".join([whole[0], whole[2][:20], b"\n", b"\xff\n", b"3\n", *whole[1:]]))
    drop_later_lines(path, 3)
    assert path.read_bytes() == b"".join(whole[:3])


@pytest.mark.parametrize(
    "line", ['{"step": "3"}', '{"step": [1]}', '{"step": {}}', '{"step": true}', '{"step": 1e999}', "[" * 100_000]
)
def test_lines_without_a_step_do_not_end_a_resume(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    JsonlSink(Run(directory=tmp_path, resume_after=2)).close()
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_metrics_are_read_without_what_is_no_line_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": "nan", "n": 3}\n[1]\n\n{"step": 2, "loss": "x"}\n{"step": 3, "loss": 0.5}\n{"st'
    )
    first, last = read_metrics(path)
    assert math.isnan(first.pop("loss"))
    assert (first, last) == ({"step": 1, "n": 3}, {"step": 3, "loss": 0.5})


def test_a_pipe_in_place_of_the_metrics_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(StorageError, match="not a regular file"):
        JsonlSink(Run(directory=tmp_path))
    with pytest.raises(OSError, match="not a regular file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_limit_of_file_sizes_is_named_with_the_file(tmp_path: Path) -> None:
    sink = JsonlSink(Run(directory=tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        with pytest.raises(StorageError, match=r"metrics\.jsonl: could not be written: .*\(ulimit -f\)"):
            sink.log(1, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    sink.close()
