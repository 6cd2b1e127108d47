"""The folder of `rlite eval`: its lock, whose samples it holds, and earlier results that were damaged."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlite.assembly.evaluate import command
from rlite.assembly.evaluate.command import recorded
from rlite.errors import ConfigError, DataError, FolderInUse
from rlite.evaluation.folder import (
    CACHE,
    LOCK,
    RESULTS,
    SAMPLES,
    Candidate,
    check_alone,
    check_no_run,
    earlier_result,
    held,
    remove_others,
)
from rlite.evaluation.journal import Journal
from rlite.evaluation.record import write_record
from rlite.services.record.files import all_files
from rlite.services.record.writer import write_table
from rlite.viewer.run import open_runs

SETTINGS: dict[str, Any] = {
    "questions": {"number": 2},
    "sampling": {"samples": 1, "temperature": 0.0, "max_new_tokens": 8},
    "tasks": {},
}
TOKENS = {"step": 0, "group": 0, "sample": 0, "sequence": 0, "text": "x", "ids": [1], "offsets": [0], "mask": [True]}


def row(group: int, **changes: Any) -> dict[str, Any]:
    key = {"step": 0, "group": group, "sample": 0, "item": str(group)}
    return {**key, "status": "evaluated", "reason": "", "reward": 1.0, **changes}


def write(folder: Path, name: str, *lines: Any, settings: Any = SETTINGS) -> None:
    """Write a whole evaluation of one model."""
    (folder / SAMPLES).mkdir(parents=True, exist_ok=True)
    header = {"version": 1, "settings": settings}
    text = "".join(json.dumps(line) + "\n" for line in [header, *lines])
    (folder / SAMPLES / f"{name}.jsonl").write_text(text)
    (folder / RESULTS).write_text(json.dumps({"models": {name: {"model": "m", "metrics": {}}}}))


def files_of(folder: Path) -> set[str]:
    return {f"{file.source} {file.kind}" for file in all_files(folder)}


def test_a_folder_has_one_evaluation_at_a_time_also_after_its_lock_was_opened_and_closed(tmp_path: Path) -> None:
    with held(tmp_path / "out"):
        (tmp_path / "out" / LOCK).read_bytes()
        with (
            pytest.raises(FolderInUse, match=r"out=.*out: another evaluation is under way there"),
            held(tmp_path / "out"),
        ):
            pass
    with held(tmp_path / "out"):
        pass


def test_a_lock_is_removed_with_a_new_folder_in_which_nothing_was_written(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new", "runs/new"):
        with pytest.raises(ConfigError), held(tmp_path / name):
            raise ConfigError("mistyped")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]
    with held(tmp_path / "new"):
        (tmp_path / "new" / RESULTS).touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == [RESULTS]


def test_a_lock_that_its_holder_removes_while_it_is_opened_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_file, removed = fcntl.lockf, []

    def removed_meanwhile(file: Any, operation: int) -> None:
        if not removed:
            removed.append((tmp_path / LOCK).unlink())
        lock_file(file, operation)

    monkeypatch.setattr(fcntl, "lockf", removed_meanwhile)
    with held(tmp_path):
        assert removed
        assert (tmp_path / LOCK).exists(), "the lock is of a file that others find"


def test_a_folder_with_another_models_samples_or_results_is_refused(tmp_path: Path) -> None:
    check_alone(tmp_path / "new", ["b"])
    write(tmp_path, "a", row(0), row(1))
    check_alone(tmp_path, ["a"])
    check_alone(tmp_path, ["a", "b"])
    (tmp_path / RESULTS).unlink()
    with pytest.raises(ConfigError, match=r"holds samples or results of a\. Choose another folder .*overwrite=true"):
        check_alone(tmp_path, ["b"])
    write(tmp_path, "a")
    (tmp_path / SAMPLES / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match="holds samples or results of a"):
        check_alone(tmp_path, ["b"])


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("config.yaml", "training run"),
        ("metrics.jsonl", "training run"),
        ("state", "training run"),
        ("config.json", "model"),
    ],
)
def test_the_folder_of_a_run_or_a_model_is_refused(name: str, whose: str, tmp_path: Path) -> None:
    check_no_run(tmp_path / "new")
    check_no_run(tmp_path)
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / name).touch()
    with pytest.raises(
        ConfigError, match=rf"the folder of a {whose}, which holds {name}; .* such as out=.*/eval-grpo$"
    ):
        check_no_run(tmp_path / "grpo")


def test_overwriting_removes_what_other_models_left_and_nothing_else(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, name, row(0), row(1))
        write_record(tmp_path, name, [row(0, tokens=[TOKENS]), row(1)])
        (tmp_path / CACHE / name).mkdir(parents=True)
    (tmp_path / SAMPLES / "mine.jsonl").write_text("my notes")
    remove_others(tmp_path, ["b"])
    assert sorted(path.name for path in (tmp_path / SAMPLES).iterdir()) == ["b.jsonl", "mine.jsonl"]
    assert files_of(tmp_path) == {"eval.b rows", "eval.b tokens"}
    assert [path.name for path in (tmp_path / CACHE).iterdir()] == ["b"]


def test_restarted_evaluation_removes_only_its_own_record(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, name, row(0))
        write_record(tmp_path, name, [row(0, tokens=[TOKENS])])
    journal = Journal(tmp_path / SAMPLES / "a.jsonl", SETTINGS, overwrite=True)
    Candidate("a", "m", SETTINGS, journal.lines, journal=journal).begin(tmp_path)
    journal.close()
    assert files_of(tmp_path) == {"eval.b rows", "eval.b tokens"}


def test_a_record_without_tokens_replaces_one_with_tokens(tmp_path: Path) -> None:
    write_record(tmp_path, "a", [row(0, tokens=[TOKENS])])
    with pytest.raises(DataError, match="the samples of a cannot be recorded, a value is damaged"):
        write_record(tmp_path, "a", [row(0, tokens=[{"ids": "x"}])])
    assert files_of(tmp_path) == {"eval.a rows", "eval.a tokens"}
    write_record(tmp_path, "a", [row(0)])
    assert files_of(tmp_path) == {"eval.a rows"}


def test_a_record_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(tmp_path, "a", [row(0)])
    replaced: list[set[str]] = []

    def written(*arguments: Any) -> Path:
        replaced.append(files_of(tmp_path))
        return write_table(*arguments)

    monkeypatch.setattr("rlite.evaluation.record.write_table", written)
    write_record(tmp_path, "a", [row(0), row(1)])
    assert replaced == [{"eval.a rows"}]


def begun(folder: Path) -> Candidate:
    journal = Journal(folder / SAMPLES / "a.jsonl", SETTINGS)
    journal.begin()
    return Candidate("a", "m", SETTINGS, journal.lines, journal=journal)


def recorded_items(folder: Path) -> list[str]:
    contents = [file.path.read_bytes() for file in all_files(folder)]  # at once: files are replaced meanwhile
    return [item for content in contents for item in pq.read_table(pa.BufferReader(content))["item"].to_pylist()]


def test_an_evaluation_that_is_under_way_can_be_viewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PAUSE_S", 0.001)
    candidate = begun(tmp_path)
    with recorded(candidate, tmp_path):
        for number in range(2):
            candidate.journal.append(row(number))
            deadline = time.monotonic() + 20
            while (found := recorded_items(tmp_path)) != [str(item) for item in range(number + 1)]:
                assert time.monotonic() < deadline, found
        [run] = open_runs([str(tmp_path)])
        assert run.record.table("eval.a")["item"].to_pylist() == ["0", "1"]
        assert (run.problems, [note.partition(":")[0] for note in run.notes]) == (
            [],
            ["an evaluation that has not ended"],
        )
    candidate.journal.close()


def test_interrupted_evaluations_record_each_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PAUSE_S", 1000)

    def interrupted(candidate: Candidate, number: int) -> None:
        with recorded(candidate, tmp_path):
            candidate.journal.append(row(number))
            raise KeyboardInterrupt

    for number in range(2):
        candidate = begun(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            interrupted(candidate, number)
        candidate.journal.close()
        assert recorded_items(tmp_path) == [str(item) for item in range(number + 1)]


def test_the_record_of_a_model_is_complete_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PAUSE_S", 1000)
    candidate = begun(tmp_path)
    with recorded(candidate, tmp_path):
        for number in range(3):
            candidate.journal.append(row(number))
    assert recorded_items(tmp_path) == ["0", "1", "2"], "the next model may take hours"
    candidate.journal.close()


def test_samples_that_cannot_be_recorded_do_not_end_an_evaluation_early(tmp_path: Path) -> None:
    candidate = begun(tmp_path)
    with recorded(candidate, tmp_path):
        candidate.journal.append(row(0, tokens=[{"ids": "x"}]))
    assert recorded_items(tmp_path) == []
    candidate.journal.close()


def test_a_whole_earlier_result_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a", row(1), row(0))
    found = earlier_result(str(tmp_path))
    assert found is not None
    assert (found.name, found.model, len(found.lines)) == ("a", "m", 2)
    assert earlier_result(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ("[", "not the results of an evaluation: Invalid JSON"),
        ({"models": {}}, "models: Dictionary should have at least 1 item"),
        ({"models": {"a": {}}}, r"models\.a\.model: Field required"),
        ({"models": ["a"]}, "models: Input should be an object"),
        ({"models": {"a": 5}}, r"models\.a: "),
        ({"models": {"../../x": {"model": "m"}}}, "none of . and - first"),
        ({"models": {"hosts\0": {"model": "m"}}}, "none of . and - first"),
        ({"models": {"a": {"model": "m"}, "b": {"model": "m"}}}, r"an evaluation of two models \(a and b\)"),
    ],
)
def test_damaged_results_are_refused(results: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, "a", row(0), row(1))
    (tmp_path / RESULTS).write_text(results if isinstance(results, str) else json.dumps(results))
    with pytest.raises(ConfigError, match=message):
        earlier_result(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "settings: questions: Field required"),
        (SETTINGS | {"tasks": 3}, "settings: tasks: "),
        (SETTINGS | {"sampling": {"samples": "1"}}, r"settings: sampling\.samples: "),
    ],
)
def test_damaged_settings_are_refused(settings: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, "a", row(0), row(1), settings=settings)
    with pytest.raises(ConfigError, match=message):
        earlier_result(str(tmp_path))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([[1], row(1)], "line 2: expected an object of JSON"),
        ([row(0)], "an unfinished evaluation: 1 of 2 samples are missing"),
        ([row(0), row(0)], r"line 3: \(0, 0\) occurs twice"),
        ([row(0), row(2)], r"line 3: \(2, 0\) occurs twice, or is not of this evaluation"),
        ([row(0), row(1, reward="1")], "line 3: reward: "),
        ([row(0), row(1, reward=float("nan"))], "line 3: reward: Input should be a finite number"),
        ([row(0), row(1, reward=None)], "line 3: .*expected a score, or a reason why there is none"),
        ([row(0), {"group": 1, "sample": 0}], "line 3: item: Field required"),
    ],
)
def test_damaged_samples_are_refused(lines: list[Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, "a", *lines)
    with pytest.raises(ConfigError, match=message):
        earlier_result(str(tmp_path))


def test_tasks_are_complete_by_their_names(tmp_path: Path) -> None:
    settings = SETTINGS | {"questions": {}, "tasks": {"tasks": ["gsm8k", "arc"]}}
    gsm8k, arc = ({"task": name, "metrics": {f"{name}/acc": 0.5}, "rows": [row(0)]} for name in ("gsm8k", "arc"))
    write(tmp_path, "a", gsm8k, arc, settings=settings)
    assert earlier_result(str(tmp_path)) is not None
    write(tmp_path, "a", gsm8k, settings=settings)
    with pytest.raises(ConfigError, match="1 of 2 tasks are missing"):
        earlier_result(str(tmp_path))
    first, second = (gsm8k | {"sample": sample, "samples": 2, "rows": [row(0, sample=sample)]} for sample in range(2))
    write(tmp_path, "a", first, arc, settings=settings)
    with pytest.raises(ConfigError, match="1 of 3 tasks are missing"):
        earlier_result(str(tmp_path))
    write(tmp_path, "a", first, second, arc, settings=settings)
    found = earlier_result(str(tmp_path))
    assert found is not None
    assert [(each["group"], each["sample"]) for each in found.rows] == [(0, 0), (0, 1), (1, 0)]
    write(tmp_path, "a", gsm8k, gsm8k, settings=settings)
    with pytest.raises(ConfigError, match="line 3: gsm8k occurs twice"):
        earlier_result(str(tmp_path))
