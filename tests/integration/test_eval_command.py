"""`rlite eval` with tiny models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import rlite
from rlite.cli import main
from rlite.errors import UnknownOptionError
from rlite.evaluation.metrics import Sample, compare
from rlite.services.record.files import ROWS, TOKENS, VERSION, VERSION_KEY, record_files
from rlite.viewer.run import UNFINISHED, open_runs
from tests import forked_python
from tests.integration.worlds import environment
from tests.tiny import build_model_dir

REWARD = r"""
import os, pathlib, time
calls = []

def correct(prompt, completions, prompt_ids, completion_ids, answer, **row):
    calls.append(prompt)
    print(f"{len(calls)} judged")
    if len(calls) == 6 and (kill := pathlib.Path(__file__).with_name("kill")).exists():
        journal, deadline = pathlib.Path(kill.read_text()), time.monotonic() + 20
        while journal.read_bytes().count(b"\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    if answer == "raise":
        raise ValueError("no such answer")
    return float(sum(map(ord, completions)) % 2)
"""
ROWS_OF_DATA = [{"id": f"q{n}", "prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
SHORT = ("max_new_tokens=6", "max_num_seqs=4", "reward.in_process=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    build_model_dir(folder / "before", hidden=32)
    build_model_dir(folder / "after", hidden=64)
    (folder / "my.py").write_text(REWARD)
    write_rows(folder / "test.jsonl", ROWS_OF_DATA)
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # commands without `out` write below the working directory


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["rlite", "eval", *map(str, arguments)])
    try:
        main()
    finally:
        rlite.shutdown()


def sources(folder: Path) -> list[str]:
    return ["--data", f"{folder}/test.jsonl", "--reward", f"{folder}/my.py:correct"]


def samples(out: Path, name: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The samples of a journal without their times."""
    _, *rows = map(json.loads, (out / "samples" / f"{name}.jsonl").read_text().splitlines())
    timed = [{key: value for key, value in row.items() if not is_time(key)} for row in rows]
    found = {(row["item"], row["sample"]): row for row in timed}
    assert len(found) == len(rows), "a sample is there twice"
    return found


def is_time(column: str) -> bool:
    return column in ("ended", "events") or column.startswith("seconds_")


def table(out: Path, source: str, kind: str) -> Any:
    (found,) = [each for each in record_files(out) if (each.source, each.kind) == (source, kind)]
    return pq.read_table(found.path)


def test_two_models_are_compared_and_their_results_can_be_compared_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "both"
    arguments = [folder / "before", folder / "after", *sources(folder), *SHORT, "record_tokens=1"]
    run(monkeypatch, *arguments, "--samples", "3", "--out", out)
    printed = capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    assert list(results["models"]) == ["before", "after"]
    assert "4 prompts x 3 samples, temperature 1 (the default of samples=3)" in printed
    assert {"accuracy", "pass@1", "pass@3", "standard_error"} <= results["models"]["before"]["metrics"].keys()

    rows = table(out, "eval.after", "rows")
    assert rows.schema.equals(ROWS)
    assert rows.schema.metadata[VERSION_KEY] == str(VERSION).encode()
    kept = rows.to_pylist()
    assert [(row["item"], row["sample"]) for row in kept] == [(f"q{n}", s) for n in range(4) for s in range(3)]
    assert {row["status"] for row in kept} == {"evaluated"}
    assert [segment["role"] for segment in kept[0]["segments"]] == ["prompt", "model"]
    assert sum(row["reward"] for row in kept) / 12 == results["models"]["after"]["metrics"]["accuracy"]
    tokens = table(out, "eval.after", "tokens")
    assert tokens.schema.equals(TOKENS)
    for row, told in zip(tokens.to_pylist(), kept[:3], strict=True):
        assert sum(row["mask"]) == told["response_tokens"] <= 6
        assert row["text"] == "".join(segment["text"] for segment in told["segments"])
        assert len(row["ids"]) == len(row["offsets"]) == len(row["logprobs"]) == len(row["versions"])
        assert row["offsets"] == sorted(row["offsets"])

    found = compare(*(of_rows(table(out, f"eval.{name}", "rows").to_pylist()) for name in ("before", "after")))
    assert results["comparison"]["difference"] == found.difference
    assert (results["comparison"]["low"], results["comparison"]["p_value"]) == (found.low, found.p_value)
    assert f"accuracy of after - before: {found.difference:+.4f} [" in printed

    for name in ("before", "after"):
        run(monkeypatch, folder / name, *sources(folder), *SHORT, "samples=3", f"out={folder}/of-{name}")
    kept = (folder / "of-before" / "results.json").read_bytes()
    for models, message in {
        ("after",): r"holds samples or results of before\. Choose another folder",
        ("of-after", "after"): r"holds samples or results of before\. Choose another folder",
    }.items():
        given = [folder / name for name in models]
        with pytest.raises(SystemExit, match=message):
            run(monkeypatch, *given, *sources(folder), *SHORT, "samples=3", f"out={folder}/of-before")
    with pytest.raises(SystemExit, match="it holds the earlier evaluation that is read"):
        run(monkeypatch, folder / "of-before", folder / "of-after", f"out={folder}/of-before", "overwrite=true")
    assert (folder / "of-before" / "results.json").read_bytes() == kept
    capsys.readouterr()
    run(monkeypatch, folder / "of-before", folder / "of-after", "k=2", f"out={folder}/again", "--json")
    value, printed = capsys.readouterr()
    written = json.loads((folder / "again" / "results.json").read_text())
    assert json.loads(value) == {"models": written["models"], "comparison": written["comparison"]} | {
        "folder": f"{folder}/again"
    }
    assert "\n4 prompts x 3 samples, temperature 1 (the default of samples=3), at most 6 new tokens" in printed
    assert "pass@2" in printed
    assert "pass@3" not in printed
    assert f"accuracy of of-after - of-before: {found.difference:+.4f} [" in printed
    assert json.loads((folder / "again" / "results.json").read_text())["comparison"]["p_value"] == found.p_value


def of_rows(rows: list[dict[str, Any]]) -> list[Sample]:
    return [Sample(row["item"], row["sample"], row["reward"]) for row in rows]


def test_a_killed_evaluation_continues_with_the_missing_samples(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward kills the process at its sixth call, when at least one of five samples is in the journal."""
    arguments = [
        *(folder / "before", *sources(folder), *SHORT, "samples=3", "deterministic=true", "dtype=float32"),
        *("top_p=0.9", "record_tokens=4"),
    ]
    run(monkeypatch, *arguments, f"out={folder}/whole")
    whole = samples(folder / "whole", "before")
    journal = folder / "killed" / "samples" / "before.jsonl"
    (folder / "kill").write_text(str(journal))
    program = [forked_python.python(), "-m", "rlite.cli", "eval", *map(str, arguments), f"out={folder}/killed"]
    killed = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (folder / "kill").unlink()
    kept = journal.read_bytes()
    before = samples(folder / "killed", "before")
    assert 0 < len(before) <= 5
    assert not (folder / "killed" / "results.json").exists()
    [killed_run] = open_runs([f"{folder}/killed"])
    assert (killed_run.notes, killed_run.problems) == ([UNFINISHED], [])
    recorded = [row for source in killed_run.record.sources for row in killed_run.record.rollouts(source, 0)]
    assert {(row["item"], row["sample"]) for row in recorded} <= before.keys()
    journal.write_bytes(kept + b'{"step": 0, "group": 3, "sam')  # as if it had been killed while it wrote
    run(monkeypatch, *arguments, f"out={folder}/killed")
    assert f"before: continuing: {len(before)} of 12 samples are there\n" in capsys.readouterr().err
    assert journal.read_bytes().startswith(kept), "what had ended stays as it is"
    assert samples(folder / "killed", "before") == whole
    assert json.loads((folder / "killed" / "results.json").read_text()) == json.loads(
        (folder / "whole" / "results.json").read_text()
    )

    kept = journal.read_bytes()
    run(monkeypatch, *arguments, f"out={folder}/killed", "k=2", "confidence=0.9")
    assert journal.read_bytes() == kept, "nothing was missing"
    metrics = json.loads((folder / "killed" / "results.json").read_text())["models"]["before"]["metrics"]
    assert "pass@2" in metrics
    assert "pass@3" not in metrics


def test_without_out_the_folder_has_the_names_of_the_models_and_the_same_command_continues_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, folder / "before", *sources(folder), *SHORT, "reward.timeout=30")
    assert capsys.readouterr().out.endswith(
        "runs/eval-before-test/results.json holds these results\nrlite view runs/eval-before-test shows the samples\n"
    )
    assert len(table(Path("runs/eval-before-test"), "eval.before", "rows")) == 4
    monkeypatch.setattr(rlite, "init", None)
    run(monkeypatch, folder / "before", *sources(folder), *SHORT, "--reward.timeout", "30")  # nothing is missing
    with pytest.raises(SystemExit, match=r"samples of other settings \(questions\.number.*choose another folder"):
        run(monkeypatch, folder / "before", *sources(folder), *SHORT, "reward.timeout=30", "limit=2")
    shutil.copytree(folder / "before", "before")
    with pytest.raises(SystemExit, match=r"samples of other settings \(model\.folder.*choose another folder"):
        run(monkeypatch, "before", *sources(folder), *SHORT, "reward.timeout=30")
    monkeypatch.undo()


@pytest.mark.nightly
def test_every_rank_of_torchrun_ends_if_no_sample_is_missing(folder: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "rlite.cli", "eval"]
    new = [folder / "before", *sources(folder), *SHORT, f"out={folder}/ranks"]
    earlier = [folder / "ranks", folder / "ranks", f"out={folder}/ranks-again"]
    for arguments in (new, new, earlier):
        program = [forked_python.python(), *launch, *map(str, arguments)]
        done = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("results.json holds these results") == 1


def test_a_changed_setting_is_refused_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder / "before", folder / "model")
    arguments = [folder / "model", *sources(folder), *SHORT, "samples=2", f"out={folder}/settings"]
    run(monkeypatch, *arguments)
    kept = (folder / "settings" / "samples" / "model.jsonl").read_bytes()
    for changes, message in {
        ("samples=3",): "sampling.samples: 2 there, 3 here",
        ("temperature=0.5",): "sampling.temperature: 1.0 there, 0.5 here",
        ("limit=2",): "questions.number: 4 there, 2 here",
        ("reward.weight=2",): "scores.reward.correct.weight: 1.0 there, 2.0 here",
    }.items():
        with pytest.raises(SystemExit, match="holds samples of other settings") as refused:
            run(monkeypatch, *arguments, *changes)
        assert message in str(refused.value)
    (folder / "my.py").write_text(f"{REWARD}\n# changed\n")
    with pytest.raises(SystemExit, match=r"scores\.code\..*my\.py: "):
        run(monkeypatch, *arguments)
    (folder / "my.py").write_text(REWARD)
    os.utime(folder / "model" / "model.safetensors", ns=(0, 0))
    with pytest.raises(SystemExit, match=r"model\.files: "):
        run(monkeypatch, *arguments)
    assert (folder / "settings" / "samples" / "model.jsonl").read_bytes() == kept
    run(monkeypatch, *arguments, "samples=1", "overwrite=true")
    assert len(samples(folder / "settings", "model")) == 4


def test_failed_samples_count_as_wrong_and_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder / "failing.jsonl", [*ROWS_OF_DATA[:2], {"id": "bad", "prompt": "?", "answer": "raise"}])
    arguments = ["--data", f"{folder}/failing.jsonl", "--reward", f"{folder}/my.py:correct", *SHORT]
    run(monkeypatch, folder / "before", *arguments, "retries=0", f"out={folder}/failing", "name=fails")
    metrics = json.loads((folder / "failing" / "results.json").read_text())["models"]["fails"]["metrics"]
    assert (metrics["num_errors"], metrics["errors/RewardRaised"]) == (1, 1)
    assert metrics["accuracy"] == pytest.approx(metrics["accuracy_finished"] * 2 / 3)
    printed = capsys.readouterr().out
    assert "errors/RewardRaised" in printed
    assert "fails: 1 of 3 samples failed; most often: RewardRaised: ValueError: no such answer" in printed
    failed = table(folder / "failing", "eval.fails", "rows").to_pylist()[2]
    assert (failed["item"], failed["status"], failed["reward"]) == ("bad", "failed", None)
    assert "no such answer" in failed["reason"]


def test_the_parts_of_several_rewards_are_recorded_and_what_they_print_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = [f"reward.{name}.path={folder}/my.py:correct" for name in ("odd", "same")]
    arguments = ["--data", folder / "test.jsonl", *rewards, "reward.same.weight=0.5", *SHORT[:2]]
    run(monkeypatch, folder / "before", *arguments, f"out={folder}/parts")
    for row in table(folder / "parts", "eval.before", "rows").to_pylist():
        parts = dict(row["reward_parts"])
        assert parts.keys() == {"odd", "same"}
        assert row["reward"] == parts["odd"] + 0.5 * parts["same"]
    printed = [json.loads(line) for line in (folder / "parts" / "prints.jsonl").read_text().splitlines()]
    kept = {(line["model"], line["row"], line["sample"], line["function"]) for line in printed}
    assert kept == {("before", f"q{n}", 0, f"reward {name}") for n in range(4) for name in ("odd", "same")}
    assert all(line["text"].endswith("judged\n") for line in printed)
    assert capsys.readouterr().err.count("judged") == 2, "one of each function's kind"
    run(monkeypatch, folder / "before", *arguments, f"out={folder}/parts", "overwrite=true", "limit=1")
    assert len((folder / "parts" / "prints.jsonl").read_text().splitlines()) == 2


def test_a_reward_that_always_fails_ends_the_command_and_no_sample_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(folder / "bad.jsonl", [{"prompt": f"{n}", "answer": "raise"} for n in range(20)])
    arguments = ["--data", folder / "bad.jsonl", "--reward", f"{folder}/my.py:correct", *SHORT, "retries=0"]
    with pytest.raises(SystemExit, match=r"(?s)the first 16 episodes failed, the last with .*no such answer"):
        run(monkeypatch, folder / "before", *arguments, f"out={folder}/bad")
    assert samples(folder / "bad", "before") == {}


def test_few_failures_without_a_success_are_no_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(folder / "judge-down.jsonl", [{"prompt": f"{n}", "answer": "raise"} for n in range(3)])
    arguments = ["--data", folder / "judge-down.jsonl", "--reward", f"{folder}/my.py:correct", *SHORT, "retries=0"]
    with pytest.raises(SystemExit, match=r"(?s)the first 3 episodes failed, the last with .*no such answer"):
        run(monkeypatch, folder / "before", *arguments, f"out={folder}/judge-down")
    assert samples(folder / "judge-down", "before") == {}
    assert not (folder / "judge-down" / "results.json").exists()


def test_failures_of_one_prompt_or_after_a_success_do_not_end_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt fails 17 times before the second is asked, and again when the evaluation continues."""
    write_rows(folder / "bad-first.jsonl", [{"prompt": "?", "answer": "raise"}, ROWS_OF_DATA[0]])
    write_rows(folder / "bad-rest.jsonl", [ROWS_OF_DATA[0], *({"prompt": "?", "answer": "raise"} for _ in range(17))])
    for name, num_samples in (("bad-first", 17), ("bad-rest", 1)):
        arguments = ["--data", folder / f"{name}.jsonl", "--reward", f"{folder}/my.py:correct", *SHORT, "retries=0"]
        run(monkeypatch, folder / "before", *arguments, f"samples={num_samples}", f"out={folder}/{name}")
        whole = samples(folder / name, "before")
        assert [row["status"] for row in whole.values()].count("failed") == 17
        journal = folder / name / "samples" / "before.jsonl"
        header, *lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join([header, *(line for line in lines if '"evaluated"' in line)]))
        run(monkeypatch, folder / "before", *arguments, f"samples={num_samples}", f"out={folder}/{name}")
        assert samples(folder / name, "before").keys() == whole.keys()


def test_an_environment_with_seeds_needs_no_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "game.py").write_text(
        "from tests.games import Dice\n\ndef make(num_steps=2):\n    return Dice(num_steps)\n"
    )
    arguments = ["--env", folder / "game.py", "--limit", 3, "max_turns=2", "max_new_tokens=4", "max_num_seqs=4"]
    run(monkeypatch, folder / "before", *arguments, f"out={folder}/game")
    rows = table(folder / "game", "eval.before", "rows").to_pylist()
    assert [row["item"] for row in rows] == ["0", "1", "2"]
    assert [(row["turns"], row["reward"]) for row in rows] == [(2, 1.0)] * 3
    roles = [segment["role"] for segment in rows[0]["segments"]]
    assert roles == ["prompt", "model", "environment", "model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/before"], "missing: a source of scores"),
        (["{folder}/before", "--reward", "{folder}/my.py:correct"], "missing: data.path=FILE"),
        (["{folder}/nowhere", "{data}"], "no such folder; check the path"),
        (["nowhere", "{data}"], "no such folder, and the Hugging Face hub gives no model of this name; check"),
        (["{folder}", "{data}"], "expected a config.json in it, found none"),
        (["{folder}/bare", "{data}"], "no tokenizer: copy tokenizer.json"),
        (["{folder}/before", "{data}", "k=2"], "k=2: pass@2 needs 2 samples of each prompt, and samples=1"),
        (["{folder}/before", "{data}", "samples=2", "temperature=0"], "all answers to a prompt would be the same"),
        (["{folder}/before", "--env", "x.py", "--reward", "{folder}/my.py:correct"], "expected one of them"),
        (["{folder}/before", "--data", "{folder}/twice.jsonl", "--reward", "{folder}/my.py:correct"], "its id 'q0'"),
        (["{folder}/before", "--data", "{folder}/empty.jsonl", "--reward", "{folder}/my.py:correct"], "empty.jsonl"),
        (["{folder}/before", "{data}", "--samples"], "--samples: expected a value"),
        (
            ["{folder}/before", "{data}", "--sample", "4"],
            "argument '--sample': no such option; did you mean '--samples'?",
        ),
        (["{folder}/before", "{folder}/after", "third", "{data}"], "third: a third model; one command compares two"),
        (["{folder}/before", "{data}", "out={folder}/other-file"], "expected the samples of an evaluation"),
    ],
)
def test_bad_input_is_said_before_a_model_is_built(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = folder / "bare"
    bare.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / "before" / name, bare / name)
    write_rows(folder / "twice.jsonl", [ROWS_OF_DATA[0], ROWS_OF_DATA[0]])
    (folder / "empty.jsonl").touch()
    (folder / "other-file" / "samples").mkdir(parents=True, exist_ok=True)
    (folder / "other-file" / "samples" / "before.jsonl").write_text("mine")
    given = " ".join(arguments).replace("{data}", " ".join(sources(folder))).format(folder=folder).split()
    monkeypatch.setattr(rlite, "init", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *given)
    assert message in str(stopped.value)
    assert (folder / "other-file" / "samples" / "before.jsonl").read_text() == "mine"


def test_overwriting_removes_no_samples_before_all_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*sources(folder), *SHORT, f"out={folder}/kept"]
    run(monkeypatch, folder / "before", *arguments)
    journal, results = folder / "kept" / "samples" / "before.jsonl", folder / "kept" / "results.json"
    kept = journal.read_bytes(), results.read_bytes()
    for more, message in {
        (folder / "nowhere",): "no such folder",
        ("max_model_len=2",): "leaves no room for an answer",
    }.items():
        with pytest.raises(SystemExit, match=message):
            run(monkeypatch, folder / "before", *more, *arguments, "overwrite=true")
        assert (journal.read_bytes(), results.read_bytes()) == kept


def test_an_interrupted_new_evaluation_is_not_read_as_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [folder / "before", *sources(folder), *SHORT, f"out={folder}/anew"]
    run(monkeypatch, *arguments)
    journal, results = folder / "anew" / "samples" / "before.jsonl", folder / "anew" / "results.json"
    whole = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(whole[:3]))
    with pytest.raises(SystemExit, match="anew: an unfinished evaluation: 2 of 4 samples are missing"):
        run(monkeypatch, folder / "anew", f"out={folder}/of-anew")
    monkeypatch.setattr(rlite, "init", None)
    with pytest.raises(TypeError):
        run(monkeypatch, *arguments, "overwrite=true")
    assert len(journal.read_text().splitlines()) == 1
    assert not results.exists()


def test_results_of_other_items_are_not_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in (("few", ROWS_OF_DATA[:2]), ("others", ROWS_OF_DATA[2:])):
        write_rows(folder / f"{name}.jsonl", rows)
        arguments = ["--data", folder / f"{name}.jsonl", "--reward", f"{folder}/my.py:correct", *SHORT]
        run(monkeypatch, folder / "before", *arguments, f"out={folder}/results-{name}")
    with pytest.raises(SystemExit, match=r"results-few and results-others cannot be compared: questions\.content"):
        run(monkeypatch, folder / "results-few", folder / "results-others")


def test_a_program_evaluates_its_own_rows_and_functions_in_its_session(folder: Path) -> None:
    def is_even(completions: list[str], **row: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 2 == 0) for text in completions]

    own: dict[str, Any] = {"max_new_tokens": 6, "max_num_seqs": 4, "samples": 2}
    with rlite.session(num_devices=1):
        found = rlite.evaluate(folder / "before", folder / "after", data=ROWS_OF_DATA, reward=is_even, **own)
        assert rlite.current_session().owners == (), "the engines are released"
    assert [model.name for model in found.models] == ["before", "after"]
    assert found.metrics["accuracy"] == sum(sample.score or 0 for sample in found.samples) / 8
    assert found.comparison == compare(*(model.samples for model in found.models))
    assert {sample.item for sample in found.samples} == {"q0", "q1", "q2", "q3"}
    with pytest.raises(UnknownOptionError, match="did you mean 'samples'"):
        rlite.evaluate(folder / "before", data=ROWS_OF_DATA, reward=is_even, sampels=2)
