"""Callbacks of a run: what they are told, what a failure costs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlite.assembly.observers import run_observers
from rlite.config import load
from rlite.errors import CallbackError, ConfigError
from rlite.services.console.sinks import read_metrics
from rlite.trainer.callbacks import CALLBACKS, Callback, Callbacks, register_callback
from rlite.trainer.rl.coefficients import Coefficients
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.observer import ReportedMetrics
from rlite.trainer.run.training_run import TrainingRun
from rlite.trainer.supervised_options import SftConfig


class Told(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_start(self, run: Any, metrics: Any) -> None:
        self.events.append("start")

    def on_step(self, run: Any, metrics: Any) -> None:
        self.events.append(f"step {run.step}: loss {metrics['loss']}")

    def on_end(self, run: Any, metrics: Any) -> None:
        self.events.append(f"end: loss {metrics.get('loss')}")


class Broken(Told):
    def __init__(self, event: str) -> None:
        super().__init__()
        setattr(self, event, self.fail)

    def fail(self, run: Any, metrics: Any) -> None:
        raise ValueError("a mistake of its own")


class Unsaved(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"best": object()}


def run_with(folder: Path, *callbacks: Callback, total_steps: int = 3) -> TrainingRun:
    config = load(SftConfig, ["actor.model_name=x", "data.path=x", f"trainer.save_dir={folder}"])
    run = TrainingRun(config, total_steps, callbacks=callbacks)
    run.observers = run_observers(run, ReportedMetrics(), "sft", dict)
    return run


def test_callback_is_called_at_every_step(tmp_path: Path) -> None:
    told = Told()
    run = run_with(tmp_path, told)
    run.open()
    run.log_step({"loss": 9.0})
    while not run.is_over:
        run.step += 1
        run.log_step({"loss": float(run.step)})
    run.close()
    steps = [f"step {step}: loss {step}.0" for step in (1, 2, 3)]
    assert told.events == ["start", *steps, "end: loss 3.0"], "an evaluation before the first step is no step"


def test_a_stop_makes_the_step_the_last_one_and_a_checkpoint_due(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stop(Callback):
        def on_step(self, run: TrainingRun, metrics: Any) -> None:
            run.stop("enough")

    run = run_with(tmp_path, Stop(), total_steps=9)
    run.open()
    assert not run.is_over
    run.step += 1
    run.log_step({})
    assert run.is_over
    assert run.is_save_due()
    run.close()
    lines = capsys.readouterr().out.splitlines()
    assert "stopped after step 1 of 9: enough" in lines
    assert [line for line in lines if "enough" in line][:-1] == ["  reason  enough"], "said at the stop and at the end"


@pytest.mark.parametrize("event", ["on_step", "on_end"])
def test_a_callback_that_raises_is_named_after_the_others_were_told(tmp_path: Path, event: str) -> None:
    told = Told()
    run = run_with(tmp_path, Broken(event), told, total_steps=1)
    run.open()
    run.step += 1
    run.log_step({"loss": 1.0})
    assert run.is_save_due()
    with pytest.raises(CallbackError, match=f"callback 'Broken' raised ValueError in {event} at step 1") as failure:
        run.close()
    assert "a mistake of its own" in str(failure.value)
    assert "training_run.py" not in str(failure.value)
    assert told.events == ["start", "step 1: loss 1.0", "end: loss 1.0"]


def test_a_callback_that_raises_at_the_start_ends_the_run_before_a_step(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match="'Broken' raised ValueError in on_start at step 0"):
        run_with(tmp_path, Broken("on_start")).open()


def test_states_are_kept_by_name_and_a_state_that_cannot_be_kept_is_a_failure() -> None:
    callbacks = Callbacks([Told(), Told()])
    assert callbacks.state_dict() == {"Told": {}, "Told-2": {}}
    unsaved = Callbacks([Unsaved()])
    assert unsaved.state_dict() == {"Unsaved": {}}
    assert "callback 'Unsaved' raised TypeError in state_dict" in str(unsaved.failure)


def test_invalid_callbacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = Told
    with pytest.raises(
        ConfigError, match="callback type: expected an object of a class that extends Callback, found <class"
    ):
        Callbacks([given])
    with pytest.raises(ConfigError, match=r"trainer\.callbacks: unknown callback 'tld'; --import FILE\.py"):
        load(SftConfig, ["actor.model_name=x", "data.path=x", "trainer.callbacks=[tld]"])
    monkeypatch.setitem(CALLBACKS, "told", Told)
    with pytest.raises(ConfigError, match=r"unknown callback 'tld'; did you mean 'told'\?"):
        Callbacks(["tld"])
    with pytest.raises(ConfigError, match="is taken by"):
        register_callback("told")(Unsaved)


def test_numbers_of_callbacks_are_logged_in_lines_of_their_own(tmp_path: Path) -> None:
    class Logs(Callback):
        def on_step(self, run: TrainingRun, metrics: Any) -> None:
            run.log({"own": metrics["loss"] * 2})

        def on_evaluate(self, run: TrainingRun, metrics: Any) -> None:
            run.log({"of_evaluation": 7})

        def on_end(self, run: TrainingRun, metrics: Any) -> None:
            run.log({"last": 1})

    run = run_with(tmp_path, Logs(), total_steps=1)
    run.open()
    run.step += 1
    run.evaluated({"test_loss": 2.0})
    run.log_step({"loss": 3.0})
    run.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [
        {"step": 1, "of_evaluation": 7.0},
        {"step": 1, "loss": 3.0},
        {"step": 1, "own": 6.0},
        {"step": 1, "last": 1.0},
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda run, metrics: run.log({"own": "high"}), "ValueError in on_step at step 1"),
        (lambda run, metrics: run.log({"step": 1.0}), "a metric cannot be named 'step'"),
        (lambda run, metrics: metrics.update(own=1.0), "AttributeError in on_step"),
        (lambda run, metrics: run.set(entropy_coef=0.1), "ppo, grpo and distill"),
    ],
)
def test_a_mistake_of_a_callback_is_named_and_ends_the_run(tmp_path: Path, wrong: Any, message: str) -> None:
    callback = Callback()
    callback.on_step = wrong  # type: ignore[method-assign]
    run = run_with(tmp_path, callback)
    run.open()
    run.step += 1
    run.log_step({"loss": 3.0})
    with pytest.raises(CallbackError, match=message):
        run.close()


def test_coefficients_that_no_file_would_record_are_not_set(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    given = load(PpoConfig, ["actor.model_name=x", "train_data.path=x", "reward.path=my.py:f"])
    run.coefficients = Coefficients(given)
    run.set(entropy_coef=0.1)
    assert run.coefficients.at(1) == {"entropy_coef": 0.1}
    run.options = run.options.replace(sinks=["tensorboard"])
    with pytest.raises(ConfigError, match=r"add jsonl to trainer\.sinks"):
        run.set(entropy_coef=0.2)
