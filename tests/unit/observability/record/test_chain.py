"""The chain of hashes: what a run that goes on says about files that were changed while it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from rlite.services.record.chain import ChainWriter, read_chain
from rlite.services.record.files import ROWS
from rlite.services.record.writer import write_table

FILES = ("latest/model.safetensors", "state/step-2/manifest.json", "state/step-9/manifest.json", "metrics.jsonl")


def table(reward: float, text: str | None) -> pa.Table:
    segments = None if text is None else [{"role": "prompt", "text": text}]
    row = {"step": 2, "group": 0, "sample": 0, "item": "0", "status": "trained", "reason": "", "reward": reward}
    return pa.Table.from_pylist([{**row, "segments": segments}], schema=ROWS)


def make_run(folder: Path, kind: str) -> Path:
    """Return a run of two steps, whose last link is of a kind."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("first\n")
    for source, step in (("train", 1), ("train", 2), ("train", 3), ("eval.test", 2)):
        write_table(folder, source, step, "rows", table(1.0, "text"))
    writer = ChainWriter(folder, 0)
    writer.begin(0, None, {})
    writer.append({"kind": kind, "step": 2})
    return folder


@pytest.mark.parametrize("kind", ["end", "save"])
def test_changes_that_a_killed_run_may_have_made_itself_are_not_told(kind: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, kind)
    for name in FILES:
        (run / name).write_text("other\n")
    write_table(run, "train", 1, "rows", table(2.0, "text"))
    write_table(run, "train", 2, "rows", table(2.0, None))  # without its texts, as at the limit of a record
    write_table(run, "train", 3, "rows", table(2.0, "text"))
    write_table(run, "eval.test", 2, "rows", table(2.0, "text"))
    changed = {*ChainWriter(run, 2).changed}
    certain = {"record/train-00000001.rows.parquet", "state/step-2/manifest.json", "metrics.jsonl"}
    own = {"latest/model.safetensors", "state/step-9/manifest.json", "record/eval.test-00000002.rows.parquet"}
    own |= {"record/train-00000002.rows.parquet"}  # a run that goes on removes those of step 3
    assert changed == (certain | own if kind == "end" else certain)


def test_a_removed_file_is_told_unless_the_run_was_killed(tmp_path: Path) -> None:
    for kind in ("end", "save"):
        run = make_run(tmp_path / kind, kind)
        (run / "record" / "train-00000001.rows.parquet").unlink()
        assert [*ChainWriter(run, 2).changed.values()] == ([None] if kind == "end" else [])


def test_what_a_failed_attempt_to_go_on_has_dropped_is_not_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, "end")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("third\n")
    writer = ChainWriter(run, 2)
    assert [*writer.changed] == ["metrics.jsonl"], "a line after the end"
    writer.begin(2, "step-2", {})
    with (run / "metrics.jsonl").open("a") as file:
        file.write("fourth\n")
    writer.append({"kind": "end", "step": 4, "error": "RolloutError"})
    (run / "metrics.jsonl").write_text("first\nthird\n")
    (run / "record" / "train-00000003.rows.parquet").unlink()
    assert ChainWriter(run, 2).changed == {}
    (run / "metrics.jsonl").write_text("fifth\nthird\n")
    assert [*ChainWriter(run, 2).changed] == ["metrics.jsonl"]


def test_a_changed_file_is_told_once_and_old_links_keep_its_old_hash(tmp_path: Path) -> None:
    run, name = make_run(tmp_path, "end"), "record/train-00000001.rows.parquet"
    before = (run / "chain.jsonl").read_bytes()
    write_table(run, "train", 1, "rows", table(2.0, "text"))
    for changed in ([name], []):
        writer = ChainWriter(run, 2)
        assert [*writer.changed] == changed
        writer.begin(2, "step-2", {})
        writer.append({"kind": "end", "step": 2})
    assert (run / "chain.jsonl").read_bytes().startswith(before)
    chain = read_chain(run)
    assert (chain.changed, chain.breaks) == ({name: 2}, [])


def test_a_run_that_overwrites_another_one_begins_a_new_chain(tmp_path: Path) -> None:
    run = make_run(tmp_path, "end")
    (run / "metrics.jsonl").write_text("other\n")
    assert ChainWriter(run, 2).changed
    writer = ChainWriter(run, None)
    (run / "chain.jsonl").unlink()
    writer.begin(0, None, {})
    links = [json.loads(line) for line in (run / "chain.jsonl").read_text().splitlines()]
    assert [(link["kind"], link["previous"], "changed" in link) for link in links] == [("start", "", False)]
