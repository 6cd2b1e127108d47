from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from subprocess import PIPE

import pytest

from rlite.errors import ConfigError
from rlite.services.record.files import Gap
from rlite.services.record.writer import write_gaps
from rlite.trainer.run.folder import lock
from rlite.viewer.run import UNFINISHED, ViewedRun, open_runs
from tests.unreadable import UNREADABLE

HELD = """
import sys
from pathlib import Path
from rlite.trainer.run.folder import lock
held = lock(Path(sys.argv[1]))
print("held", flush=True)
input()
"""


def test_paths_without_a_run_are_refused_together(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "runs" / "ppo").mkdir(parents=True)
    (tmp_path / "runs" / "ppo" / "config.yaml").touch()
    with pytest.raises(ConfigError) as raised:
        open_runs([str(tmp_path / name) for name in ("gone", "file", "runs")])
    gone, file, parent = str(raised.value).splitlines()
    assert "no such folder" in gone
    assert f"found a file; give its folder: {tmp_path}" in file
    assert "not the folder of a run" in parent
    assert "runs below it: ppo" in parent


def test_an_evaluation_that_was_killed_before_its_first_record_is_opened(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "grpo.jsonl").touch()
    [run] = open_runs([str(tmp_path)])
    assert run.record.sources == []
    assert (run.notes, run.problems) == ([UNFINISHED], [])
    assert run.is_unfinished_evaluation
    (tmp_path / "results.json").write_text('{"models": {}}')
    run.refresh()
    assert (run.notes, run.problems) == ([], [])
    assert not run.is_unfinished_evaluation


def test_steps_that_could_not_be_recorded_are_noted(tmp_path: Path) -> None:
    write_gaps(tmp_path, [Gap(3, 7, "the disk is full"), Gap(12, None, "the disk is full")])
    [run] = open_runs([str(tmp_path)])
    assert run.notes == [
        "record: steps 3 to 7 are missing or incomplete: the disk is full",
        "record: steps 12 to the end are missing or incomplete: the disk is full",
    ]


def test_half_a_run_is_shown(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"a: [\xff")
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "train-00000001.rows.parquet").write_bytes(b"PAR1")
    [run] = open_runs([str(tmp_path)])
    assert run.config == {}
    assert [problem.split(":")[0] for problem in run.problems] == ["config.yaml", "train-00000001.rows.parquet"]


def test_a_run_that_cannot_be_followed_says_so_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    [run] = open_runs([str(tmp_path)])
    run.metrics.series = None  # type: ignore[assignment]  # stands for an error that nobody foresees
    with run.metrics.path.open("a") as file:
        file.write('{"step": 2, "loss": 1}\n')
    assert not run.refresh()
    assert run.problems == ["cannot be followed: TypeError: argument of type 'NoneType' is not iterable"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_config_that_cannot_be_read_is_a_problem(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    [run] = open_runs([str(tmp_path)])
    assert run.config == {}
    assert run.problems[0].startswith("config.yaml: cannot be read: ")
    assert run.metrics.last_step == 1


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "trace.json", "record/gaps.jsonl"):
        os.mkfifo(tmp_path / name)
    [run] = open_runs([str(tmp_path)])
    assert run.trace.events() == []
    assert run.notes == []
    told = ("config.yaml: cannot be read", "metrics.jsonl", "trace.json: cannot be read")
    assert run.problems == [f"{name}: not a regular file" for name in told]


def test_a_config_that_a_resumed_run_writes_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: 1")
    [run] = open_runs([str(tmp_path)])
    path.write_text("a: 2.5")
    assert run.refresh()
    assert run.config == {"a": 2.5}
    assert not run.refresh()
    path.write_text("a: [")
    run.refresh()
    assert run.problems[0].startswith("config.yaml: cannot be read")


def test_runs_of_one_name_are_distinguished(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "run" / "record").mkdir(parents=True)
    paths = [str(tmp_path / parent / "run") for parent in ("a", "b")]
    assert [run.name for run in open_runs(paths)] == paths
    assert [run.name for run in open_runs(paths[:1])] == ["run"]


def test_a_trace_that_grows_is_news_of_its_own_kind(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    [run] = open_runs([str(tmp_path)])
    assert run.refresh() == set()
    (tmp_path / "trace.json").write_text("[\n")
    assert run.refresh() == {"trace"}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 1}\nx\n')
    assert run.refresh() == {"run"}
    assert run.problems == ["metrics.jsonl: 1 line without metrics"]


@pytest.mark.parametrize(("seconds", "live_s"), [([], 60.0), ([1.0], 60.0), ([900.0, 300.0, 310.0], 930.0)])
def test_a_run_of_long_steps_counts_as_live_between_them(tmp_path: Path, seconds: list[float], live_s: float) -> None:
    lines = [f'{{"step": {step}, "seconds": {value}}}\n' for step, value in enumerate(seconds, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    [run] = open_runs([str(tmp_path)])
    assert run.live_s == live_s


def test_a_run_whose_process_has_ended_is_not_live(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HELD, str(tmp_path)], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
        run = ViewedRun(tmp_path, "run")
        assert "run" in run.refresh()
        assert run.live_s == 60.0
        process.kill()
    assert run.refresh() == {"run"}, "pages hear of the end at once"
    assert run.live_s == 0.0
    with closing(lock(tmp_path)):
        run.refresh()
        assert run.live_s == 60.0, "it goes on in this process"
    run.refresh()
    assert run.live_s == 0.0, "and has let go of its folder"


@pytest.mark.parametrize("content", ["", "{", '{"host": "another machine", "pid": 1, "started": 1.0}'])
def test_a_run_whose_process_is_not_known_counts_as_live_for_a_while(tmp_path: Path, content: str) -> None:
    (tmp_path / ".lock").write_text(content)
    run = ViewedRun(tmp_path, "run")
    run.refresh()
    assert run.live_s == 60.0
