"""`rlite eval --tasks` gives the numbers of the harness's own model, and continues after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import rlite
from rlite.cli import main
from tests.harness.conftest import MAX_MODEL_LEN

SUMS = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
WRITTEN = """
task: written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false}}
process_results: !function scoring.length
metric_list: [{{metric: length, aggregation: mean, higher_is_better: true}}]
"""
SCORING = """
import os, pathlib

def length(doc, results):
    if pathlib.Path(__file__).with_name("kill").exists():
        os.kill(os.getpid(), 9)
    return {"length": float(len(results[0]))}
"""


@pytest.fixture(scope="module")
def tasks(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, text in (("sums", SUMS), ("written", WRITTEN)):
        (folder / f"{name}.yaml").write_text(text.format(file=questions))
    (folder / "scoring.py").write_text(SCORING)
    return folder


def command(path: Path, tasks: Path, out: Path) -> list[str]:
    options = ["--tasks", "sums,written", f"task_path={tasks}", f"max_model_len={MAX_MODEL_LEN}", "dtype=float32"]
    return ["eval", str(path), *options, "max_num_seqs=16", "name=model", f"out={out}"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    rlite.shutdown()  # the session of other tests
    monkeypatch.setattr(sys, "argv", ["rlite", *arguments])
    main()


def metrics(out: Path) -> dict[str, float]:
    return json.loads((out / "results.json").read_text())["models"]["model"]["metrics"]


def test_tasks_give_the_harness_numbers_and_continue_after_a_kill(
    path: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = command(path, tasks, tmp_path)
    (tasks / "kill").touch()
    killed = subprocess.run([sys.executable, "-m", "rlite.cli", *arguments], env=dict(os.environ), check=False)
    assert killed.returncode == -signal.SIGKILL
    (tasks / "kill").unlink()
    journal = tmp_path / "samples" / "model.jsonl"
    kept = journal.read_bytes()
    assert [json.loads(line).get("task") for line in kept.splitlines()] == [None, "sums"]

    run(monkeypatch, *arguments)
    assert journal.read_bytes().startswith(kept)
    oracle = HFLM(str(path), device="cpu", dtype="float32", batch_size=3, max_length=MAX_MODEL_LEN - 2)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    expected: Any = lm_eval.simple_evaluate(oracle, tasks=["sums", "written"], task_manager=manager)
    found = metrics(tmp_path)
    assert found["sums/acc"] == expected["results"]["sums"]["acc,none"]
    assert found["sums/acc_norm"] == expected["results"]["sums"]["acc_norm,none"]
    assert found["written/length"] == expected["results"]["written"]["length,none"]

    with pytest.raises(SystemExit, match=r"no task 'summs'; did you mean 'sums'\?"):
        run(monkeypatch, "eval", str(path), "--tasks", "summs", f"task_path={tasks}")
    with pytest.raises(SystemExit, match=r"tasks\.num_fewshot: None there, 1 here|num_fewshot: null there, 1 here"):
        run(monkeypatch, *arguments, "num_fewshot=1")
