from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from rlite.errors import ConfigError
from rlite.services.record.files import ROWS
from rlite.services.record.writer import compact, write_table
from rlite.viewer import load


def test_a_run_becomes_data_frames(recorded: Path) -> None:
    run = load(recorded)
    assert len(run.rows) == 256 + 32
    train = run.rows[run.rows["source"] == "train"]
    assert train.groupby("step")["reward/correct"].mean().index.tolist() == list(range(1, 9))
    assert run.metrics.loc[8, "accuracy"] == pytest.approx(0.7)
    assert run.config["actor"]["clip"] == 0.2
    assert run.problems == []


def test_texts_and_tokens_are_read_by_step(recorded: Path) -> None:
    run = load(recorded)
    assert set(run.tokens([3])["step"]) == {3}
    assert len(run.texts([3])) == 24
    assert run.texts([3])["segments"][0][0]["role"] == "prompt"
    assert len(run.texts()) == 8 * 24
    assert len(run.texts(source="eval.countdown")) == 32


def test_the_documented_example_counts_evaluations_as_used(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path("docs/viewer.md").read_text()
    [example] = re.findall(r"```python\n(from rlite.viewer import load.*?)```", page, re.DOTALL)
    exec(example.replace("runs/ppo", str(recorded)).replace("[10]", "[8]"), found := {})
    assert set(found["lost"]["status"]) & {"trained", "evaluated"} == set()
    assert "filtered" in capsys.readouterr().out


def test_damaged_tokens_are_a_problem_when_the_run_is_loaded(recorded: Path, tmp_path: Path) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    path = run / "record" / "train-00000008.tokens.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    [problem] = load(run).problems
    assert problem.startswith("train-00000008.tokens.parquet: cannot be read")


def test_tokens_that_are_damaged_inside_are_a_problem_when_they_are_read(recorded: Path, tmp_path: Path) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    path = run / "record" / "train-00000008.tokens.parquet"
    content = bytearray(path.read_bytes())
    content[4:4000] = bytes(3996)
    path.write_bytes(content)
    loaded = load(run)
    assert loaded.problems == []
    assert loaded.tokens([8]).empty
    assert loaded.problems[0].startswith("train-00000008.tokens.parquet: cannot be read")


def test_files_that_were_merged_after_the_run_was_loaded_are_read(tmp_path: Path) -> None:
    for step in range(1, 101):
        rows = [{"step": step, "group": 0, "sample": 0, "status": "trained", "segments": []}]
        write_table(tmp_path, "train", step, "rows", pa.Table.from_pylist(rows, schema=ROWS))
    run = load(tmp_path)
    compact(tmp_path, 100)
    assert run.texts([3, 7])["step"].tolist() == [3, 7]
    assert len(run.texts()) == 100


def test_an_unknown_source_is_refused_with_the_known_ones(recorded: Path) -> None:
    run = load(recorded)
    for read in (run.texts, run.tokens):
        with pytest.raises(ConfigError, match=r"source=eval.typo: the record of first has train, eval.countdown"):
            read(source="eval.typo")


def test_a_folder_without_a_record_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": "inf"}\n')
    run = load(tmp_path)
    assert run.rows.empty
    assert {"source", "step", "status", "reward"} <= set(run.rows)
    assert run.metrics["loss"].isna().all()
    assert run.texts().empty
    with pytest.raises(ConfigError, match="no such folder"):
        load(tmp_path / "gone")
