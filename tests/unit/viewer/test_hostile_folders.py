"""Folders of runs from strangers: files that become huge, lead elsewhere or never end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from rlite.files import MAX_LINE
from rlite.runtime.sandbox.calls import Code
from rlite.services.record import reader
from rlite.services.record.files import ROWS, TOKENS
from rlite.services.record.reader import ALL, Part, read_file_part, read_part_aside
from rlite.viewer.metrics import MAX_NAMES
from rlite.viewer.run import open_runs
from tests.hostile_runs import lead_out, often, texts_often, write_bomb
from tests.recorded_run import Shape, write_run

ROOT = Path(__file__).resolve().parents[3]
TOO_LARGE = "cannot be read: a part of it takes more than 128 MiB"
PEAK = """
import sys
from rlite.viewer.answers import answer
from rlite.viewer.answers import Query
from rlite.viewer.metrics import MAX_NAMES
from rlite.viewer.run import open_runs
runs = open_runs(sys.argv[1:])
for name in ("overview", "search"):
    answer(runs, name, Query([("run", "0"), ("text", "x"), ("source", "train")]))
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) >> 10)
print(*runs[0].problems, sep="\\n")
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", Shape(steps=2, groups=2, samples=2))


def test_files_that_become_huge_are_named_and_the_others_are_shown(run: Path) -> None:
    write_bomb(run, 3, 75_000, answer=often("y" * 2_000, 75_000))
    write_bomb(run, 4, 150, segments=texts_often("x" * 1_000_000, 150))
    command = [sys.executable, "-c", PEAK, str(run)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    assert int(told[0]) < 400, "MiB"
    assert told[1:] == [f"train-{step:08d}.rows.parquet: {TOO_LARGE}" for step in (3, 4)]
    [viewed] = open_runs([str(run)])
    assert set(viewed.record.table("train")["step"].to_pylist()) == {1, 2, 4}


def die(part: Any) -> None:
    os._exit(3)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (die, "the process of its reader ended with exit code 3 while it computed"),
        (lambda part: 7, "its reader answered something else"),
        (lambda part: ["read", None, b"no table"], ""),
        (lambda part: ["damaged", "\x1b[2J"], ""),
    ],
)
def test_a_reader_that_dies_or_answers_anything_is_a_problem_of_the_file(
    run: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, reason: str
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(reader, "_CODE", Code.of(answer, what="its reader"))
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    [viewed] = open_runs([str(run)])
    assert len(viewed.problems) == len([*run.glob("record/train*.parquet")])
    assert all(reason in problem and problem.isprintable() for problem in viewed.problems)
    assert viewed.record.table("train").num_rows == 0


def test_the_rows_of_many_files_stay_within_a_budget(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [whole] = open_runs([str(run)])
    size = whole.record.table("train").nbytes
    monkeypatch.setattr("rlite.services.record.reader.MAX_KEPT", int(0.75 * size))
    [viewed] = open_runs([str(run)])
    assert set(viewed.record.table("train")["step"].to_pylist()) == {1}
    assert viewed.problems[0].startswith("train-00000002.rows.parquet: not shown: with its rows, more than")


@pytest.mark.parametrize("schema", [ROWS, TOKENS])
@pytest.mark.parametrize("last_first", [False, True])
def test_the_process_reads_what_this_process_would_read(run: Path, schema: pa.Schema, last_first: bool) -> None:
    kind = "rows" if schema is ROWS else "tokens"
    path = run / "record" / f"train-00000001.{kind}.parquet"
    for chosen in (ALL, pa.compute.field("sample") == 1):
        place: int | None = 0
        while place is not None:
            part = Part(path, schema, chosen, last_first, place)
            (table, place), expected = read_part_aside(part), read_file_part(part)
            assert (table, place) == expected
    with pytest.raises(FileNotFoundError):
        read_part_aside(Part(run / "none", schema, ALL, last_first))


def test_a_relative_path_is_that_of_this_process(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(run / "record" / "train-00000001.rows.parquet", ROWS)
    expected, _ = read_part_aside(part)  # in a process that begins here
    monkeypatch.chdir(run)
    assert read_part_aside(part._replace(path=part.path.relative_to(run)))[0] == expected


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("config.yaml", "config.yaml"),
        ("metrics.jsonl", "metrics.jsonl"),
        ("record", "record"),
        ("record/train-00000001.rows.parquet", "train-00000001.rows.parquet"),
        ("record/train-00000001.tokens.parquet", "train-00000001.tokens.parquet"),
    ],
)
def test_a_link_out_of_the_folder_is_told_and_not_followed(run: Path, tmp_path: Path, name: str, told: str) -> None:
    [before] = open_runs([str(run)])
    lead_out(run, [name], tmp_path / "elsewhere")
    [viewed] = open_runs([str(run)])
    assert f"{told}: a link that leads out of its folder, which is not followed" in viewed.problems
    shown = [
        (own.config, own.metrics.series, own.record.table("train"), own.record.tokens("train", 1))
        for own in (before, viewed)
    ]
    assert shown[0] != shown[1]


def test_traces_and_results_behind_links_are_told_and_not_read(run: Path, tmp_path: Path) -> None:
    (run / "results.json").write_text('{"models": {"a": {"metrics": {}}}}')
    lead_out(run, ["trace.json", "results.json"], tmp_path / "elsewhere")
    [viewed] = open_runs([str(run)])
    assert viewed.trace.events() == []
    assert viewed.results.models == {}
    assert sum("a link that leads out of its folder" in problem for problem in viewed.problems) == 2


def test_links_within_the_folder_and_to_the_folder_are_followed(run: Path, tmp_path: Path) -> None:
    (run / "kept").mkdir()
    for name in ("metrics.jsonl", "record/train-00000001.rows.parquet"):
        target = run / "kept" / Path(name).name
        shutil.move(run / name, target)
        (run / name).symlink_to(target)
    (tmp_path / "latest").symlink_to(run)
    [viewed] = open_runs([str(tmp_path / "latest")])
    assert viewed.problems == []
    assert set(viewed.record.table("train")["step"].to_pylist()) == {1, 2}
    assert viewed.metrics.last_step == 2


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "trace.json", "results.json", ".lock", "record"])
def test_a_loop_of_links_hides_its_own_part_alone(run: Path, name: str) -> None:
    if (run / name).is_dir():
        shutil.rmtree(run / name)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(name)
    [viewed] = open_runs([str(run)])
    assert (viewed.metrics.last_step == 2) == (name != "metrics.jsonl")
    assert (len(viewed.record.table("train")) > 0) == (name != "record")


@pytest.mark.parametrize("name", ["metrics.jsonl", "trace.json"])
def test_a_file_that_is_mostly_a_hole_is_told_and_not_read(run: Path, name: str) -> None:
    write_hole(run / name)
    [viewed] = open_runs([str(run)])
    num_read = len({"metrics.jsonl": viewed.metrics.series, "trace.json": viewed.trace.events()}[name])
    assert num_read == 0
    [problem] = viewed.problems
    assert problem.startswith(f"{name}: ")
    assert problem.endswith("more than 4 GiB, of which no new lines are read")


def test_a_lock_that_never_ends_is_not_read(run: Path, tmp_path: Path) -> None:
    for make in (os.mkfifo, write_hole, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        make(run / ".lock")
        [viewed] = open_runs([str(run)])
        assert (viewed.problems, viewed.is_gone) == ([], False)
        (run / ".lock").rename(tmp_path / f"{len(list(tmp_path.iterdir()))}")


def test_metrics_of_too_many_names_are_told_and_left_out(run: Path) -> None:
    many = {f"m{index}": 1.0 for index in range(MAX_NAMES)}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, **many, "loss": 1.0}) + "\n")
    [viewed] = open_runs([str(run)])
    assert len(viewed.metrics.series) == MAX_NAMES
    assert viewed.metrics.series["seconds"].keys() == {1, 2}
    assert f"metrics.jsonl: it has more than {MAX_NAMES} metrics; the others are not shown" in viewed.problems


def write_hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 36)


def test_pipes_in_the_place_of_results_and_records_are_not_waited_for(run: Path) -> None:
    os.mkfifo(run / "results.json")
    os.mkfifo(run / "record" / "train-00000003.rows.parquet")
    [viewed] = open_runs([str(run)])
    assert viewed.results.models == {}
    assert set(viewed.record.table("train")["step"].to_pylist()) == {1, 2}


def test_files_without_lines_are_read_a_part_at_a_time(run: Path) -> None:
    for name in ("metrics.jsonl", "trace.json", "results.json", "record/gaps.jsonl"):
        with open(run / name, "a") as file:
            file.truncate(200 << 20)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('\n{"step": 9, "loss": 1}\n')
    [viewed] = open_runs([str(run)])
    viewed.trace.refresh()
    assert viewed.metrics.last_step == 9
    assert [problem.split(":")[0] for problem in viewed.problems] == ["results.json", "metrics.jsonl", "trace.json"]
    assert len(viewed.trace._file.rest) <= MAX_LINE
