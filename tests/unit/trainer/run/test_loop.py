"""The run loop: what a failure at each of its boundaries leaves behind, and who is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import TensorDict

from rlite.config import load
from rlite.errors import CallbackError, CheckpointError, DivergedError, StreamedDataError
from rlite.trainer.callbacks import Callback
from rlite.trainer.run.folder import lock
from rlite.trainer.run.observer import Observer
from rlite.trainer.run.training_run import Judged, TrainerLoop, TrainingRun
from rlite.trainer.supervised_options import SftConfig

TOTAL = 6
Fault = Callable[[str, int], None]


class Engine:
    """A model that is a number: the steps that it has learnt."""

    def __init__(self, fault: Fault) -> None:
        self.weight, self._fault = 0, fault

    def nonfinite_parameters(self) -> list[str]:
        return []

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "weight").write_text(str(self.weight))

    def save_state(self, path: Path, asynchronous: bool, kept: Any, **facts: Any) -> Any:
        self._fault("save", facts["step"])
        path.mkdir(parents=True)
        (path / "facts.json").write_text(json.dumps({**facts, "weight": self.weight}))
        return SimpleNamespace(done=lambda: True, result=lambda: path)

    def load_state(self, path: Path) -> dict[str, Any]:
        facts = json.loads((path / "facts.json").read_text())
        self.weight = facts["weight"]
        return dict(facts)


class Told(Observer):
    """Notes what it is told."""

    def __init__(self, fault: Fault) -> None:
        self.events: list[str] = []
        self._fault = fault

    def on_train(self, run: TrainingRun, metrics: dict[str, float]) -> None:
        metrics["entered"] = 1.0

    def on_step(self, run: TrainingRun, metrics: Any) -> None:
        assert metrics["entered"] == 1.0
        self._fault("observe", run.step)
        self.events.append(f"step {run.step}")

    def on_log(self, run: TrainingRun, metrics: Any) -> None:
        self.events.append(f"evaluation of step {run.step}")

    def on_save(self, run: TrainingRun, metrics: Any) -> None:
        self.events.append(f"save {run.step}")

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        self.events.append("end" if error is None else type(error).__name__)


class OnStep(Callback):
    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def on_step(self, run: TrainingRun, metrics: Any) -> None:
        self._fault("callback", run.step)


class Trainer(TrainerLoop):
    """Learns nothing in 6 steps, evaluates every second one, and saves then."""

    def __init__(self, folder: Path, fault: Fault = lambda place, step: None) -> None:
        argv = ["actor.model_name=x", "data.path=x", f"trainer.save_dir={folder}", "trainer.save_freq=2"]
        options = load(SftConfig, [*argv, "trainer.save_async=false", "trainer.max_skipped_steps=2"])
        self.run = TrainingRun(options, TOTAL, callbacks=[OnStep(fault)])
        self.fault, self.engine, self.told = fault, Engine(fault), Told(fault)
        self.losses: dict[int, float] = {}
        self._is_due = False

    def start(self) -> None:
        self.run.restore(self.engine)  # type: ignore[arg-type]
        self.run.observers = [self.told]
        self.run.open()

    def _next_batch(self) -> TensorDict:
        self.fault("batch", self.run.step + 1)
        return TensorDict({}, [])

    def learn(self, batch: TensorDict) -> TensorDict:
        self.fault("learn", self.run.step + 1)
        self.engine.weight += 1
        return batch

    def _finish(self, learnt: TensorDict) -> dict[str, float]:
        self._is_due = (self.run.step + 1) % 2 == 0
        return self._end_step(learnt, lambda: {"loss": self.losses.get(self.run.step, 1.0)})

    def _is_evaluation_due(self, is_saving: bool) -> bool:
        return self._is_due

    def _evaluate_sets(self) -> Judged:
        self.fault("evaluate", self.run.step)
        self._is_due = False
        return Judged({"test_loss": 1.0}, {"test_loss": 1.0}, self.run.step)

    def _save_evaluated(self, folder: Path) -> None:
        self.engine.save(folder)

    def _save(self) -> None:
        self.run.save()


def failing(place: str, step: int, error: Exception) -> Fault:
    def fault(reached: str, at: int) -> None:
        if (reached, at) == (place, step):
            raise error

    return fault


def steps(trainer: Trainer) -> list[int]:
    return [int(event.split()[1]) for event in trainer.told.events if event.startswith("step")]


def test_a_run_observes_each_step_after_its_evaluation_and_saves_after_both(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    metrics = trainer.fit()
    assert metrics.items() >= {"loss": 1.0, "entered": 1.0, "test_loss": 1.0}.items()
    assert trainer.told.events == [
        *("step 1", "step 2", "save 2", "step 3", "step 4", "save 4", "step 5", "step 6", "save 6", "end")
    ]
    assert trainer.engine.weight == TOTAL


@pytest.mark.parametrize(
    ("place", "logged", "saved"),
    [
        ("batch", [1, 2, 3], 2),
        ("learn", [1, 2, 3], 2),
        ("evaluate", [1, 2, 3], 2),
        ("observe", [1, 2, 3], 2),
        ("callback", [1, 2, 3, 4], 4),
        ("save", [1, 2, 3, 4], 2),
    ],
)
def test_a_failure_at_any_boundary_of_step_4_leaves_a_run_that_goes_on(
    tmp_path: Path, place: str, logged: list[int], saved: int
) -> None:
    error: Exception = CheckpointError("full") if place == "save" else RuntimeError("fault")
    first = Trainer(tmp_path, failing(place, 4, error))
    raised = CallbackError if place == "callback" else type(error)
    with pytest.raises(raised, match=r"full|fault"):
        first.fit()
    assert steps(first) == logged
    assert first.told.events[-1] == raised.__name__, "observers are closed with the error"
    lock(tmp_path).close()  # the folder is free
    second = Trainer(tmp_path)
    second.fit()
    assert steps(second) == list(range(saved + 1, TOTAL + 1))
    assert second.engine.weight == TOTAL, "no step is lost, and none is made twice"
    assert second.told.events[-1] == "end"


def test_steps_before_bad_data_are_saved(tmp_path: Path) -> None:
    first = Trainer(tmp_path, failing("batch", 4, StreamedDataError("row 7")))
    with pytest.raises(StreamedDataError, match="row 7"):
        first.fit()
    assert first.told.events[-2:] == ["save 3", "StreamedDataError"]


def test_bad_steps_save_nothing_and_end_the_run(tmp_path: Path) -> None:
    first = Trainer(tmp_path)
    first.losses = {4: float("nan"), 5: float("nan")}
    with pytest.raises(DivergedError, match=r"Resume with trainer\.load_ckpt_from=.*step-2"):
        first.fit()
    assert [event for event in first.told.events if event.startswith("save")] == ["save 2"]
    assert first.told.events[-1] == "DivergedError"


def test_an_observer_that_cannot_start_ends_the_run_and_those_before_it_are_closed(tmp_path: Path) -> None:
    class NotStarting(Observer):
        def on_start(self, run: TrainingRun, metrics: Any) -> None:
            raise OSError("no disk")

    class Pair(Trainer):
        def start(self) -> None:
            self.run.restore(self.engine)  # type: ignore[arg-type]
            self.run.observers = [self.told, NotStarting()]
            self.run.open()

    trainer = Pair(tmp_path)
    with pytest.raises(OSError, match="no disk"):
        trainer.fit()
    assert trainer.told.events == ["OSError"]
