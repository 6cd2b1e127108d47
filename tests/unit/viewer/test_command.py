from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rlite.cli import main
from rlite.errors import ConfigError
from rlite.key_value import split_positional
from rlite.services.record.files import ROWS
from rlite.services.record.writer import write_table
from rlite.viewer.export import export
from rlite.viewer.run import open_runs


def view(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["rlite", "view", *arguments])
    main()


def answers_in(path: Path) -> dict[str, Any]:
    packed = re.search(r'id="answers">([^<]*)<', path.read_text())
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def wide_run(folder: Path) -> Path:
    """Write a run with 30 steps of 100 failed rollouts."""
    base = {"sample": 0, "status": "failed", "reason": "x" * 100}
    for step in range(1, 31):
        rows = [{**base, "step": step, "group": 100 * step + n, "item": f"{step} {n}"} for n in range(100)]
        write_table(folder, "train", step, "rows", pa.Table.from_pylist(rows, schema=ROWS))
    return folder


def test_arguments_without_a_key_are_runs() -> None:
    given = ["runs/a", "export=a.html", "/tmp/x=1", "--config", "c.yaml", "--help"]
    assert split_positional(given) == (["runs/a", "/tmp/x=1"], ["export=a.html", "--config", "c.yaml", "--help"])


def test_the_export_has_everything_but_old_texts(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.html"
    view(monkeypatch, str(recorded), "--export", str(path))
    assert f"{path}: " in capsys.readouterr().out
    keys = [json.loads(key) for key in answers_in(path)]
    assert {name for name, _ in keys} >= {"runs", "overview", "rows", "sample", "item", "ledger", "timeline", "config"}
    assert len([key for key in keys if key[0] == "sample"]) == 256 + 2 * 16
    assert "http://" not in re.sub(r"data:[^\"' ]+|http://www.w3.org/\S+", "", path.read_text())


def test_the_newest_texts_are_exported_as_far_as_they_fit(recorded: Path, tmp_path: Path) -> None:
    runs = open_runs([str(recorded)])
    told = export(runs, tmp_path / "out.html", [], 1)
    keys = [json.loads(key) for key in answers_in(tmp_path / "out.html")]
    steps = [dict(parameters)["step"] for name, parameters in keys if name == "sample"]
    assert 0 < told["texts"] < told["rollouts"]
    assert "8" in steps
    assert "1" not in steps


def test_rows_that_do_not_fit_are_left_out_and_named(tmp_path: Path) -> None:
    told = export(open_runs([str(wide_run(tmp_path))]), tmp_path / "out.html", [3], 1)
    assert told["bytes"] < 1_000_000
    rows_text, prompts_text = (text.split(": ", 1)[1] for text in told["left_out"])
    [number] = map(int, re.findall(r"rows of (\d+) steps", rows_text))
    assert 10 < number < 29
    answers = answers_in(tmp_path / "out.html")
    questions = [json.loads(key) for key in answers]
    carried = sorted(int(dict(parameters)["step"]) for name, parameters in questions if name == "rows")
    assert carried == [3, *range(31 - (30 - number - 1), 31)], "the chosen step, and the newest"
    assert answers['["runs",[]]'][0]["problems"] == [rows_text, prompts_text]


def test_steps_can_be_chosen_for_the_export(recorded: Path, tmp_path: Path) -> None:
    runs = open_runs([str(recorded)])
    export(runs, tmp_path / "out.html", [2], 30)
    steps = {dict(p)["step"] for name, p in map(json.loads, answers_in(tmp_path / "out.html")) if name == "sample"}
    assert steps == {"2"}
    with pytest.raises(ConfigError, match=r"export_steps=\[99\]: the record has none"):
        export(runs, tmp_path / "out.html", [99], 30)


def test_chosen_steps_come_before_the_rows_of_other_steps(tmp_path: Path) -> None:
    steps = list(range(1, 10))
    export(open_runs([str(wide_run(tmp_path))]), tmp_path / "out.html", steps, 1)
    questions = [json.loads(key) for key in answers_in(tmp_path / "out.html")]
    carried = [int(dict(parameters)["step"]) for name, parameters in questions if name == "sample"]
    assert sorted(carried) == sorted(steps * 100)
    rows = {int(dict(parameters)["step"]) for name, parameters in questions if name == "rows"}
    assert set(steps) <= rows


def test_chosen_steps_that_do_not_fit_name_the_size_that_they_need(tmp_path: Path) -> None:
    runs = open_runs([str(wide_run(tmp_path))])
    told = r"these steps take ([2-9]) MB, more than export_mb=1; raise export_mb, or choose fewer steps"
    with pytest.raises(ConfigError, match=told) as raised:
        export(runs, tmp_path / "out.html", list(range(1, 31)), 1)
    needed = re.search(told, str(raised.value))
    assert needed is not None
    export(runs, tmp_path / "out.html", list(range(1, 31)), int(needed[1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "runs: expected the folder of a run, as in `rlite view runs/quickstart`"),
        (["gone"], "gone: no such folder"),
        (["{run}", "port=70000"], "expected a number between 0 and 65535"),
        (["{run}", "--export", "{run}"], "expected a file such as run.html, found a folder"),
        (["{run}", "--export"], "--export: expected a value after it"),
        (["{run}", "--export", "{run}/nosuch/k.html"], "nosuch/k.html: there is no folder {run}/nosuch; make it, or"),
        (["{run}", "exprot=a"], "did you mean 'export'"),
        (["{run}", "--prot", "1"], "did you mean '--port'"),
        (["{run}", "--port", "70000"], "expected a number between 0 and 65535"),
    ],
)
def test_wrong_arguments_end_with_one_message(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        view(monkeypatch, *(argument.format(run=recorded) for argument in arguments))
    assert message.format(run=recorded) in str(ended.value)


def test_runs_without_a_record_are_exported_beside_runs_that_have_one(recorded: Path, tmp_path: Path) -> None:
    bare = tmp_path / "sft"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    for folders in ([bare], [bare, recorded]):
        export(open_runs([str(folder) for folder in folders]), tmp_path / "out.html", [], 30)
        found = answers_in(tmp_path / "out.html")
        assert found['["series",[["names","loss"],["run","0"]]]'] == {"loss": {"steps": [1], "values": [0.5]}}
        assert any('["item",' in key for key in found) == (len(folders) == 2)


def test_an_exported_page_names_files_that_are_damaged(recorded: Path, tmp_path: Path) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    for name in ("train-00000008.tokens.parquet", "train-00000007.rows.parquet"):
        (run / "record" / name).write_bytes(b"PAR1")
    export(open_runs([str(run)]), tmp_path / "out.html", [], 1)
    [about] = answers_in(tmp_path / "out.html")['["runs",[]]']
    assert [problem.split(":")[0] for problem in about["problems"]] == [
        "train-00000007.rows.parquet",
        "train-00000008.tokens.parquet",
    ]
