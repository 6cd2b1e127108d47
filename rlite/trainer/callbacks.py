"""Callbacks: objects that a run calls at its steps, and that may stop the run.

    start ──> on_start
    step  ──> [evaluation ──> on_evaluate] ──> on_step ──> [checkpoint ──> on_save]
    end   ──> on_end

They are called in the process that runs the loop: the driver, which under torchrun is rank 0, and never in a worker.
The console, the record, sinks, traces and alarms observe a run through the same interface: a
`rlite.trainer.run.observer.Observer` is a callback that sees more of the run. This module imports no torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from rlite.errors import CallbackError, ConfigError, own_traceback
from rlite.registry import Table

if TYPE_CHECKING:
    from rlite.trainer.run.training_run import TrainingRun

Event = Literal["on_start", "on_step", "on_evaluate", "on_save", "on_end"]
Metrics = Mapping[str, float]


class Callback:
    """Receives the run and its metrics. A subclass overrides the methods that it needs.

    The run has `step`, `total_steps`, `folder`, `config` and `console`. `run.log({"own": 0.5})` logs numbers with the
    step. `run.set(entropy_coef=0.01)` changes coefficients from the next step on. `run.stop(reason)` ends the run after
    this step with a checkpoint. If a method raises an exception, the run ends in the same way, with a CallbackError.
    """

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Begin. `metrics` is empty. A resumed run has `run.step` above 0, and the callback has its state again."""

    def on_step(self, run: TrainingRun, metrics: Metrics) -> None:
        """Take the metrics of a step, which are logged. A checkpoint of this step is written afterwards."""

    def on_evaluate(self, run: TrainingRun, metrics: Metrics) -> None:
        """Take the metrics of an evaluation, before `on_step`. `ppo` also evaluates before its first step.

        If `on_step` ends the run, the sets that are due at its end are evaluated afterwards.
        """

    def on_save(self, run: TrainingRun, metrics: Metrics) -> None:
        """Take the metrics of a step after which `latest/` was written. `state/` may still be written by workers.

        Changes of the callback's own state, `run.set` and a stop are not in this checkpoint.
        """

    def on_end(self, run: TrainingRun, metrics: Metrics) -> None:
        """End, with the metrics of the last step: after the last step, a stop, a signal, or an error in a callback.

        It is not called if another error ends the run. All files of the run are written.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as values that JSON can represent. It is saved with each checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of the checkpoint that the run resumes from. It is called before `on_start`."""


CALLBACKS: Table[Callable[[], Callback]] = Table("callback", given=())
"""callbacks by name: classes, or functions that make one, which are called without arguments"""


def register_callback(name: str) -> Callable[[Any], Any]:
    """Register a class of callbacks, or a function without arguments that makes one, for `trainer.callbacks=[name]`.

    Args:
        name: an item of `trainer.callbacks`.

    Returns:
        A decorator, which returns the class or function unchanged. It raises ConfigError if the name is taken.
    """
    return CALLBACKS.register(name)


class Callbacks:
    """The callbacks of one run, called in order.

    Args:
        given: registered names, and objects. A callback that is given twice has a number behind its second name.

    Raises:
        ConfigError: a name is unknown, or an object is no Callback.
        CallbackError: a callback could not be made.
    """

    def __init__(self, given: Sequence[str | Callback]) -> None:
        self.failure: CallbackError | None = None
        """first error that a callback raised"""
        self.by_name: dict[str, Callback] = {}
        seen: Counter[str] = Counter()
        for each in given:
            name, callback = self._made(each)
            seen[name] += 1
            self.by_name[name if seen[name] == 1 else f"{name}-{seen[name]}"] = callback

    def call(self, event: Event, run: TrainingRun, metrics: Metrics) -> None:
        """Call a method of every callback. An exception becomes `failure`, and the other callbacks are still called.

        Args:
            event: name of the method.
            run: the run.
            metrics: metrics of the step or of the evaluation.
        """
        for name, callback in self.by_name.items():
            with self._blamed(name, f"{event} at step {run.step}"):
                getattr(callback, event)(run, MappingProxyType(dict(metrics)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every callback by name. An unavailable state is {}, and its error becomes `failure`."""
        states: dict[str, Any] = {}
        for name, callback in self.by_name.items():
            states[name] = {}
            with self._blamed(name, "state_dict"):
                states[name] = json.loads(json.dumps(callback.state_dict()))
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> bool:
        """Give every callback the state that was saved under its name; a new callback begins without one.

        Returns:
            Whether the callbacks have the names of the saved ones.

        Raises:
            CallbackError: a callback does not take its state.
        """
        for name in states.keys() & self.by_name.keys():
            with self._blamed(name, "load_state_dict"):
                self.by_name[name].load_state_dict(states[name])
        if self.failure is not None:
            raise self.failure
        return states.keys() == self.by_name.keys()

    def _made(self, given: str | Callback) -> tuple[str, Callback]:
        name, callback = (given, None) if isinstance(given, str) else (type(given).__name__, given)
        if callback is None:
            make = CALLBACKS.check(name, {})
            with self._blamed(name, "its construction"):
                callback = make()
            if self.failure is not None:
                raise self.failure
        if not isinstance(callback, Callback):
            expected = "expected an object of a class that extends Callback"
            raise ConfigError(f"callback {name}: {expected}, found {callback!r}")
        return name, callback

    @contextmanager
    def _blamed(self, name: str, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a callback may raise anything
            if self.failure is None:
                advice = f"The same command goes on from the newest checkpoint.\n{own_traceback(error)}"
                self.failure = CallbackError(f"callback {name!r} raised {type(error).__name__} in {where}. {advice}")
                self.failure.__cause__ = error
