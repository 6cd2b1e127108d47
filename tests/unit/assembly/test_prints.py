"""What functions print is shown once for each kind, and kept in the folder of the run without secrets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rlite.assembly import prints
from rlite.assembly.prints import PrintLog
from rlite.config import load
from rlite.rollout.episode import Episode, running
from rlite.runtime.sandbox.function import SandboxFunction
from rlite.runtime.sandbox.prints import tell
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.observer import Console
from rlite.trainer.run.training_run import TrainingRun

NEEDED = ["actor.model_name=x", "train_data.path=x", "reward.path=my.py:f", "reward.env_vars=[JUDGE]"]


class Shown(Console):
    def __init__(self) -> None:
        self.reports: list[tuple[str, dict[str, Any]]] = []

    def report(self, title: str, rows: Any, style: str = "") -> None:
        self.reports.append((title, dict(rows)))


@pytest.fixture
def run(tmp_path: Path) -> TrainingRun:
    run = TrainingRun(load(PpoConfig, [*NEEDED, f"trainer.save_dir={tmp_path}"]), 9)
    run.console = Shown()
    run.step = 3
    return run


def lines(run: TrainingRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "prints.jsonl").read_text().splitlines()]


def shown(run: TrainingRun) -> list[tuple[str, dict[str, Any]]]:
    assert isinstance(run.console, Shown)
    return run.console.reports


def test_texts_have_their_row_and_step_and_one_of_each_kind_is_shown(run: TrainingRun) -> None:
    log = PrintLog(run)
    log.on_start(run, {})
    for row, is_trained in (("r1", True), ("r2", False)):
        episode = Episode(0.0)
        episode.item, episode.sample, episode.is_trained = row, 2, is_trained
        with running(episode):
            tell("reward f", f"score {len(row) / 3}\n")
    tell("reward f", "another text\n")
    log.close(run, None)
    tell("reward f", "nobody listens any more")
    assert lines(run) == [
        {"step": 4, "function": "reward f", "text": "score 0.6666666666666666\n", "row": "r1", "sample": 2},
        {"step": 3, "function": "reward f", "text": "score 0.6666666666666666\n", "row": "r2", "sample": 2},
        {"step": 3, "function": "reward f", "text": "another text\n"},
    ]
    assert [(title, rows["row"]) for title, rows in shown(run)] == [
        ("reward f printed", "r1"),
        ("reward f printed", ""),
    ], "numbers make no other kind"


def test_a_resumed_run_drops_what_the_steps_that_it_repeats_have_printed(run: TrainingRun) -> None:
    path = run.folder / "prints.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "text": ""}) + "\n" for step in (1, 3, 4)) + '{"step": 3, "te')
    PrintLog(run).on_start(run, {})
    assert [line["step"] for line in lines(run)] == [1, 3]


def test_no_secret_of_the_environment_is_kept_or_shown(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"SOME_API_KEY": "0123456789-abc", "DB_PASSWORD": 'pass"word\\long', "JUDGE": "named-by-env-vars"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    log = PrintLog(run)
    log.on_start(run, {})

    def leaks(x: dict[str, str]) -> None:
        print(x, *x.values(), "sk-notInTheEnvironment0123456789", sep="\n")

    asyncio.run(SandboxFunction(leaks, 15.0, what="reward f").call(x=secrets))
    log.close(run, None)
    told = (run.folder / "prints.jsonl").read_text() + str(shown(run))
    for secret in (*secrets.values(), "notInTheEnvironment"):
        assert secret not in told
        assert json.dumps(secret)[1:-1] not in told
    assert told.count("(removed)") >= 8


def test_the_file_and_the_console_are_bounded(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prints, "MAX_FILE", 10_000)
    log = PrintLog(run)
    log.on_start(run, {})
    for number in range(1000):
        tell("reward f", f"{number:x} " + "x" * 90)
    log.close(run, None)
    assert (run.folder / "prints.jsonl").stat().st_size < 10_300
    assert lines(run)[-1]["text"].startswith("3e7 "), "the newest stay"
    assert len(shown(run)) == prints.MAX_KINDS


def test_a_full_disk_costs_a_warning_and_not_the_run(run: TrainingRun) -> None:
    (run.folder / "prints.jsonl").mkdir(parents=True)
    log = PrintLog(run)
    monkey = run.folder / "prints.jsonl"
    monkey.rmdir()
    log.on_start(run, {})
    monkey.mkdir()
    tell("reward f", "text")
    tell("reward f", "more text")
    assert [title for title, _ in shown(run)] == [
        "reward f printed",
        "what functions print is not kept from here on",
        "reward f printed",
    ]
