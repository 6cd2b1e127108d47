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
import pyarrow.parquet as pq
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

import rlite
from rlite.cli import main
from rlite.evaluation.statistics import clustered_standard_error
from rlite.services.record.files import record_files
from tests.harness.conftest import MAX_MODEL_LEN

SUMS = """
task: sums
tag: both
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
tag: both
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
RAMBLING = WRITTEN.replace("task: written", "task: rambling").replace("better: true", "better: false")
SCORING = """
import os, pathlib
calls = []

def length(doc, results):
    calls.append(doc)
    kill = pathlib.Path(__file__).with_name("kill")
    if kill.exists() and len(calls) == int(kill.read_text()):
        os.kill(os.getpid(), 9)
    return {"length": float(len(results[0]))}
"""


@pytest.fixture(scope="module")
def tasks(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, text in (("sums", SUMS), ("written", WRITTEN), ("rambling", RAMBLING.replace("tag: both\n", ""))):
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
    (tasks / "kill").write_text("1")
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


def rows(out: Path) -> list[dict[str, Any]]:
    (file,) = [each for each in record_files(out) if each.kind == "rows"]
    return pq.read_table(file.path).to_pylist()


def test_several_samples_of_a_task_are_drawn_and_continue_after_a_kill(
    path: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scoring kills the process in the second of three samples of ten questions."""
    arguments = [*command(path, tasks, tmp_path), "--samples", "3"]
    (tasks / "kill").write_text("15")
    killed = subprocess.run([sys.executable, "-m", "rlite.cli", *arguments], env=dict(os.environ), check=False)
    assert killed.returncode == -signal.SIGKILL
    (tasks / "kill").unlink()
    kept = (tmp_path / "samples" / "model.jsonl").read_bytes()
    _, *lines = map(json.loads, kept.splitlines())
    assert [(line["task"], line["sample"], line["samples"]) for line in lines] == [("sums", 0, 1), ("written", 0, 3)]

    run(monkeypatch, *arguments)
    printed = capsys.readouterr()
    assert "model, task written: continuing: 1 of 3 samples are there\n" in printed.err
    assert "20 questions of sums, written x 3 samples, temperature 1 (the default of samples=3)\n" in printed.out
    assert (tmp_path / "samples" / "model.jsonl").read_bytes().startswith(kept)
    found = rows(tmp_path)
    written = [row for row in found if row["item"].startswith("written/")]
    assert sorted((row["item"], row["sample"]) for row in written) == [
        (f"written/{question}", sample) for question in range(10) for sample in range(3)
    ]
    assert len({(row["group"], row["sample"]) for row in found}) == len(found) == 10 + 30
    answers = [[row["segments"][1]["text"] for row in written if row["sample"] == sample] for sample in range(3)]
    assert len(set(map(tuple, answers))) == 3, "also those after the kill draw other random numbers"
    by_question: dict[str, list[float]] = {}
    for row in written:
        by_question.setdefault(row["item"], []).append(row["score"])
    told = metrics(tmp_path)
    assert told["written/length"] == pytest.approx(sum(map(sum, by_question.values())) / 30)
    assert told["written/length_stderr"] == pytest.approx(clustered_standard_error(by_question.values()))
    assert not any(name.startswith("written/pass@") for name in told), "a length is no success"


def test_log_likelihoods_are_computed_once_and_the_command_says_so(
    path: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, *command(path, tasks, tmp_path), "--samples", "2", "--tasks", "sums")
    assert "model, task sums: its log-likelihoods are the same for every sample" in capsys.readouterr().err
    assert len(rows(tmp_path)) == 10


def test_a_tag_of_tasks_of_both_kinds_has_samples_of_those_that_generate_text(
    path: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, *command(path, tasks, tmp_path), "--samples", "2", "--tasks", "both", "limit=3")
    places = sorted((row["item"], row["sample"]) for row in rows(tmp_path))
    once = [(f"sums/{question}", 0) for question in range(3)]
    assert places == [*once, *((f"written/{question}", sample) for question in range(3) for sample in range(2))]
    assert {"sums/acc", "sums/acc_stderr", "written/length", "written/length_stderr"} <= metrics(tmp_path).keys()


def test_a_task_whose_score_is_better_if_lower_is_told_and_its_answers_have_the_options_of_the_command(
    path: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tasks", "rambling", "limit=3", "max_new_tokens=2", "num_fewshot=4", "max_model_len=40"]
    run(monkeypatch, *command(path, tasks, tmp_path), *options)
    printed = capsys.readouterr()
    assert "rambling/length (lower is better)" in printed.out
    assert "model, task rambling: 3 contexts lost the beginning (the model reads 38 tokens" in printed.err
    _, line = map(json.loads, (tmp_path / "samples" / "model.jsonl").read_text().splitlines())
    assert (line["higher_is_better"], line["lower_is_better"]) == ({"rambling/length": False}, ["rambling"])
    tokens = [fewest_tokens(path, row["segments"][1]["text"]) for row in rows(tmp_path)]
    assert max(tokens) <= 2, "and not the 4 of the task"


def fewest_tokens(path: Path, text: str) -> int:
    """The smallest number of tokens whose texts are `text`: encoding it may take more than were sampled."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = set(tokenizer.batch_decode([[token] for token in range(len(tokenizer))]))
    fewest = [0]  # of the text up to each place
    for end in range(1, len(text) + 1):
        fewest.append(1 + min(fewest[start] for start in range(end) if text[start:end] in texts))
    return fewest[-1]
