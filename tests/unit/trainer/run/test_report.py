"""The report of a run: metrics of all attempts, and the places of what exists."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlite.api import TrainedRun
from rlite.services.console.observers import RunReport
from rlite.trainer.options import RunOptions, TrainerOptions
from rlite.trainer.run.observer import ReportedMetrics
from rlite.trainer.supervised_options import EpochOptions


def make_run(folder: Path, step: int = 0, total_steps: int = 2, **more: Any) -> Any:
    """What a report sees of a run."""
    return SimpleNamespace(
        folder=folder,
        step=step,
        total_steps=total_steps,
        is_over=step == total_steps,
        is_interrupted=False,
        stop_reason="",
        **{"best": SimpleNamespace(value=None, step=0), "saved": saved_in(None), **more},
    )


def saved_in(checkpoint: Path | None) -> Any:
    return SimpleNamespace(checkpoints=SimpleNamespace(found=checkpoint))


def log(report: RunReport, run: Any, step: int, metrics: dict[str, float]) -> None:
    run.step = step
    report.on_step(run, metrics)


def test_end_report_shows_improvements_over_all_attempts_and_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0, "test_loss": 4.0}) + "\n")
    (tmp_path / "latest").mkdir()
    options = EpochOptions(save_dir=str(tmp_path), sinks=["jsonl", "tensorboard", "wandb"])
    report = RunReport(
        options,
        ReportedMetrics(of_steps=("loss", "lr"), compared=("test_loss",), evaluated=("test_loss",)),
    )
    run = make_run(tmp_path, step=1)
    report.on_start(run, {})
    log(report, run, 2, {"loss": 2.0, "test_loss": 1.0})
    report.close(run, None)
    # a long folder makes two lines of one
    lines = capsys.readouterr().out.replace(",\n             ", ", ").splitlines()
    assert lines[1:] == [
        "finished after step 2 of 2",
        "  test_loss  4.0000 at step 1 -> 1.0000 at step 2",
        "  loss       3.0000 -> 2.0000, means of the first and of the last step",
        f"  model      {tmp_path}/latest",
        f"  curves     {tmp_path}/metrics.jsonl, tensorboard --logdir {tmp_path}, wandb",
    ]


def test_a_run_without_a_file_of_metrics_reports_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("not read")
    report = RunReport(
        EpochOptions(save_dir=str(tmp_path), sinks=[], console=["reward"]), ReportedMetrics(of_steps=("reward", "loss"))
    )
    run = make_run(tmp_path)
    report.on_start(run, {})
    for step, reward in ((1, 0.25), (2, 0.75)):
        log(report, run, step, {"reward": reward, "loss": 1.0})
    report.close(run, None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[:2]] == [
        ["step", "1/2", "reward", "0.25"],
        ["step", "2/2", "reward", "0.75"],
    ]
    assert lines[2:] == [
        "finished after step 2 of 2",
        "  reward  0.2500 -> 0.7500, means of the first and of the last step",
    ]


def test_the_metrics_that_decide_are_always_shown_and_the_best_model_has_its_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "best").mkdir()
    options = EpochOptions(
        save_dir=str(tmp_path), sinks=[], best_metric="b/x", best_is_highest=False, stop_at={"a/pass@2": 1}
    )
    names = [f"{name}/accuracy" for name in "abc"]
    metrics = ReportedMetrics(of_steps=("loss", "lr"), headlines=names, evaluated=[*names, "b/x", "a/pass@2"])
    report = RunReport(options, metrics)
    run = make_run(tmp_path, best=SimpleNamespace(value=0.25, step=1))
    report.on_start(run, {})
    for step, value in ((1, 0.25), (2, 0.5)):
        values = {"loss": 1.0, "lr": 1.0, **dict.fromkeys([*names, "b/x"], value), "a/pass@2": value / 2}
        log(report, run, step, values)
    report.close(run, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[2:-4:2] == ["loss", "b/x", "a/pass@2", "lr", "a/accuracy", "b/accuracy", "c/accuracy"]
    assert lines[3] == "  b/x         0.2500 at step 1 -> 0.5000 at step 2"
    assert lines[4].startswith("  a/pass@2    0.1250 at step 1 -> 0.2500 at step 2")
    assert lines[-1] == f"  best model  {tmp_path}/best, b/x 0.2500 at step 1"


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (EpochOptions(save_dir="x", sinks=[]), "trainer.n_epochs"),
        (EpochOptions(save_dir="x", sinks=[], total_steps=2), "trainer.total_steps"),
        (TrainerOptions(save_dir="x", sinks=[]), "trainer.total_steps"),
    ],
)
def test_a_finished_run_names_the_limit_that_it_has(
    capsys: pytest.CaptureFixture[str], options: RunOptions, limit: str
) -> None:
    report = RunReport(options, ReportedMetrics())
    report.on_start(make_run(Path("x"), step=2, saved=saved_in(Path("x/state/step-2"))), {})
    assert f"raise {limit}, or choose another trainer.save_dir" in capsys.readouterr().out


def test_a_run_is_shown_with_the_accuracy_of_each_set_by_name(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path, {"math/accuracy": 0.25, "code/accuracy": 1.0, "loss": 2.0})
    assert repr(run) == f"TrainedRun({tmp_path}, math/accuracy 0.2500, code/accuracy 1.0000, loss 2.0000)"
