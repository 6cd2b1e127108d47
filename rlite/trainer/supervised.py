"""The step of the trainers that learn from rows (sft, rm, dpo, kto)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from tensordict import TensorDict

import rlite
from rlite.assembly import supervised as assembly
from rlite.data.readers.formats import RowKind
from rlite.data.sft import preference_rows
from rlite.data.tokens import TokenRows
from rlite.errors import ConfigError, EvaluationInterrupted
from rlite.help import UNNAMED
from rlite.observability import stats_tracker
from rlite.trainer.callbacks import Callback
from rlite.trainer.held_out import HeldOutOptions, key_of, metrics_of, prefixed
from rlite.trainer.model.modules import Reference, policy_module, trained_engine
from rlite.trainer.model.options import ModelOptions
from rlite.trainer.model.prompt_lengths import model_limit, vocab_size_of
from rlite.trainer.run.best import check_evaluated
from rlite.trainer.run.observer import Observer, ReportedMetrics
from rlite.trainer.run.program_objects import ProgramObjects
from rlite.trainer.run.schedule import EvaluationSchedule, interval, topic_of
from rlite.trainer.run.training_run import Judged, TrainerLoop, TrainingRun, loss_stats, step_metrics
from rlite.trainer.supervised_options import SupervisedConfig
from rlite.wording import counted

C = TypeVar("C", bound=SupervisedConfig)


class SupervisedTrainer(TrainerLoop, Generic[C]):
    """Trainer of one model on token rows. A subclass names the model, the loss and the kind of rows.

    Needs a session: call `rlite.init()` first.

    Args:
        options: the run's config.
        rows: token rows to learn; for rm and dpo pairs of them.
        test_rows: token rows to evaluate on.
        callbacks: callbacks besides those of `trainer.callbacks`.
    """

    key: ClassVar[Literal["actor", "critic"]] = "actor"
    """key of the model in the config"""
    data_key: ClassVar[str] = "data"
    """key of the data in the config"""
    config_class: type[C]
    module: ClassVar[Callable[..., Any]] = policy_module
    """makes the module to train"""
    tokenise: ClassVar[Callable[..., TokenRows]]
    """makes token rows of the rows of a file"""
    kind: ClassVar[RowKind]
    """kind of the rows"""
    shown: ClassVar[Sequence[str]]
    """metrics of every step for the console"""
    headlines: ClassVar[Sequence[str]] = ("test_loss",)
    """metrics of evaluations for the console"""

    def __init__(
        self,
        options: C,
        rows: TokenRows,
        test_rows: TokenRows | Mapping[str, TokenRows] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.options, self.rows = options, rows
        self.test_sets = test_rows if isinstance(test_rows, Mapping) else {UNNAMED: test_rows} if test_rows else {}
        self.model: ModelOptions = getattr(options, self.key)
        self.loss = self.make_loss()
        trainer = options.trainer
        self.loader = rows.loader(options.data.batch_size, trainer.seed, trainer.n_epochs, trainer.total_steps)
        self.engine = trained_engine(type(self).module, self.model, self.loader.num_batches)
        module: Any = self.engine.module
        module.further_end_ids = self._new_end_ids
        self.reported = self.reported_metrics()
        check_evaluated(trainer, self.reported.evaluated)
        self.run = TrainingRun(options, self.loader.num_batches, True, callbacks)
        self._batches: Iterator[TensorDict] = iter(())
        self._judged_at = -1
        """step after which sets were evaluated last"""
        every = {name: options.test_data.get(name, HeldOutOptions()).every for name in self.set_names}
        self.schedule = EvaluationSchedule(self.run, {name: own or trainer.test_freq for name, own in every.items()})
        self.build_options = self._build_options()
        self.reference = self.make_reference()

    @property
    def _new_end_ids(self) -> list[int]:
        """End tokens that the model learns besides its own."""
        return [] if self.rows.ends is None else sorted(self.rows.ends.new)

    @abstractmethod
    def make_loss(self) -> Any:
        """Return the loss to minimise: (outputs, data) -> mean loss of a pack, or (mean, dict of metrics).

        It also has `weight(data)`, the weight of a pack's mean, and `reported`, the names of its metrics.
        """

    def make_reference(self) -> Reference | None:
        """Return the model that the loss compares with, if there is one."""
        return None

    def reported_metrics(self) -> ReportedMetrics:
        """Return the names of the metrics that the run shows."""
        losses = metrics_of(self.test_sets, [f"test_{name}" for name in ("loss", *self.loss.reported)])
        headlines = metrics_of(self.test_sets, self.headlines)
        return ReportedMetrics(of_steps=self.shown, headlines=headlines, compared=losses, evaluated=losses)

    def describe_loss(self) -> str:
        """Return the loss in words, for the plan of the run."""
        return type(self.loss).__name__

    def _check_rows(self, model: tuple[int, int | None], capacity: int, name: str, table: str, rows: TokenRows) -> None:
        """Check that every item fits the model and the devices.

        `model`: tokens of the vocabulary, and the most tokens of a row. `capacity`: the most tokens on one device.
        """
        rows.check_model(*model, table)
        rows.check_capacity(capacity, name, table)

    def _build_options(self) -> dict[str, Any]:
        """Return the build options of the trained engine."""
        model, sizes = self.model, ("ddp_size", "sp_size", "tp_size")
        try:
            options = model.build_options(len(rlite.current_session().devices), self.options.trainer.seed)
        except ConfigError as error:
            given = ", ".join(f"{self.key}.{name}={getattr(model, name)}" for name in sizes)
            raise ConfigError(f"{given}: {error}") from error
        sizes_of_model = vocab_size_of(model.model_name), model_limit(model.model_name)
        factors = [f" x {name}" for name in ("sp_size", "tp_size") if getattr(model, name) > 1]
        name = f"{self.key}.max_length_per_device{''.join(factors)}"
        capacity = model.max_length_per_device * model.tp_size * model.sp_size
        tests = {key_of(name): rows for name, rows in self.test_sets.items()}
        for table, rows in {"data": self.rows, **tests}.items():
            check = partial(self._check_rows, sizes_of_model, capacity, name, table)
            if rows.stream is None:
                check(rows)
            else:
                rows.stream.check("capacity", check)
        return options

    # -- a step --------------------------------------------------------------------------------------------------

    def _next_batch(self) -> TensorDict | None:
        """Return the next rows to learn."""
        return next(self._batches, None)

    def learn(self, batch: TensorDict) -> tuple[TensorDict, dict[str, float]]:
        """Return a batch and its statistics, after an update of the model."""
        return batch, self.update(self.prepare(batch))

    def prepare(self, batch: TensorDict) -> TensorDict:
        """Return a batch with all keys that the loss reads."""
        return batch

    @stats_tracker.record_timing("update")
    def update(self, batch: TensorDict) -> dict[str, float]:
        """Make one optimizer step and one step of the learning rate.

        Returns:
            The batch's statistics.
        """
        stats = self.engine.train_batch(batch, self.loss, self.loss.weight)
        self.engine.step_lr_scheduler()
        return loss_stats(stats)

    def _finish(self, learnt: tuple[TensorDict, Mapping[str, float]]) -> dict[str, float]:
        """Return the metrics of a step after its end."""
        return self.finish_step(*learnt)

    def finish_step(self, batch: TensorDict, stats: Mapping[str, float]) -> dict[str, float]:
        """Count the step, evaluate and save if due, and log.

        Args:
            batch: the batch of the step.
            stats: the batch's statistics.

        Returns:
            The step's metrics.
        """
        return self._end_step(batch, lambda: {**stats, **step_metrics(batch)})

    # -- the run -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build the engine, resume if asked, and report the plan."""
        self.engine.build(**self.build_options)
        facts = self.run.restore(self.engine)
        if facts:
            self.loader.load_state_dict(facts["loader"])
            self.schedule.resume(facts.get("owed", ()))
            self.run.total_steps = self.run.step + self.loader.num_left  # another batch_size makes others
        self._batches = iter(self.loader)
        self.run.observers = self.observers()
        self.run.open()
        self.engine.train()
        if self.reference is not None:
            self.reference.build(self.build_options)

    def observers(self) -> Sequence[Observer]:
        """Return who observes the run: sinks, the console and others."""
        return assembly.make_observers(self, self._repeated)

    def plan(self) -> dict[str, str]:
        """Return how a step's work is divided, as text by topic."""
        return assembly.make_plan(self)

    def evaluation_plan(self) -> dict[str, str]:
        """Return what is evaluated and when, as text by topic."""
        return {
            topic_of(name): f"loss of {counted(len(rows), 'item')}, {interval(self.schedule.intervals[name])}"
            for name, rows in self.test_sets.items()
        }

    def _save(self) -> None:
        owed = self.schedule.due() if self.run.is_interrupted else []
        self.run.save(loader=self.loader.state_dict(), owed=owed)

    def _save_evaluated(self, folder: Path) -> None:
        """Write the model, which was evaluated as it is now, into a folder."""
        self.engine.save(folder)

    def _is_evaluation_due(self, is_saving: bool) -> bool:
        """Return whether a set is due and the run is not interrupted.

        Sets that are due because an evaluation has ended the run are evaluated before the save, in a line of their own.
        """
        if not self.schedule.intervals or (self._judged_at == self.run.step and not is_saving):
            return False
        return not self.run.is_interrupted and bool(self.schedule.due())

    def _evaluate_sets(self) -> Judged:
        """Return what `evaluate_due` has found."""
        due, self._judged_at = self.schedule.due(), self.run.step
        metrics = self.evaluate_due()
        if not self.run.is_interrupted:
            self.schedule.mark(due)
        return Judged(metrics, self.without_invalid(metrics), self.run.step)

    def without_invalid(self, evaluation: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics of the newest evaluations from which the best model is chosen."""
        return evaluation

    def evaluate_due(self) -> dict[str, float]:
        """Return the metrics of the sets that are due after this step. An interruption leaves the others."""
        metrics: dict[str, float] = {}
        with suppress(EvaluationInterrupted):
            for name in filter(self.schedule.is_due, self.test_sets):
                metrics |= prefixed(name, self.evaluate(self.test_sets[name]))
                self.schedule.mark([name])
        return metrics

    @property
    def set_names(self) -> list[str]:
        """The names of the sets that the run evaluates."""
        return [*self.test_sets]

    def evaluate(self, rows: TokenRows) -> dict[str, float]:
        """Return means of the loss and its metrics over token rows, as `test_...`.

        Raises:
            EvaluationInterrupted: the run was interrupted.
        """
        sums: dict[str, tuple[float, float]] = {}
        batch_size = self.options.data.batch_size
        for number, batch in enumerate(rows.batches(batch_size)):
            if self.run.is_interrupted:
                raise EvaluationInterrupted("a signal has interrupted the run")
            self.run.console.note(f"evaluation: {number * batch_size} of {len(rows)} items")
            stats = self.engine.eval_batch(self.prepare(batch), self.loss, self.loss.weight)
            counts = self.metric_counts(batch)
            for key in stats.keys() - {"weight", "num_tokens", "num_microbatches", "shared_tokens"}:
                total, count = sums.get(key, (0.0, 0.0))
                own = counts.get(key, stats["weight"])
                sums[key] = total + stats[key] * own, count + own
        return {f"test_{key}": total / count for key, (total, count) in sums.items() if count}

    def metric_counts(self, batch: TensorDict) -> dict[str, float]:
        """Return the numbers of elements of metrics of a batch that are means over something else than the loss."""
        return {}

    # -- the command ---------------------------------------------------------------------------------------------

    main = classmethod(assembly.main)
    train = classmethod(assembly.train)

    @classmethod
    def read_further(cls, options: C, given: ProgramObjects) -> dict[str, Any]:
        """Return further arguments of the trainer, which are read before the session begins.

        Args:
            options: the trainer's config.
            given: objects of a program, in place of what the options name.
        """
        return {}


class PairTrainer(SupervisedTrainer[C]):
    """Trainer on preference pairs (`rlite.data.sft.preference_rows`)."""

    tokenise = preference_rows
    kind = "preferences"
    shown = ("loss", "accuracy", "margin", "seconds", "tokens_per_second", "lr", "grad_norm")
    headlines = ("test_loss", "test_accuracy")
