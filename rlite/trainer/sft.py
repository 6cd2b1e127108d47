"""Supervised fine-tuning.

    torchrun --nproc_per_node=N -m rlite.trainer.sft actor.model_name=MODEL data.path=rows.json data.max_length=2048
    python -m rlite.trainer.sft ...                     one device
    python -m rlite.trainer.sft launcher=ray ...

A row of data holds `prompt` and `response`, or `messages`, of which every turn of the assistant is learnt.
"""

from __future__ import annotations

from rlite.assembly.command import run_module
from rlite.trainer.run.program_objects import ProgramObjects
from rlite.trainer.supervised_options import SftConfig

if __name__ == "__main__":  # before the imports of this file, which load torch
    run_module("sft", SftConfig)


from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlite.assembly import supervised as assembly
from rlite.assembly.evaluate.answers import read_generated
from rlite.data.sft import sft_rows
from rlite.data.tokens import TokenRows
from rlite.evaluation.episodes import Evaluation
from rlite.evaluation.record import EvaluationRecord
from rlite.evaluation.sets import EvaluationSet, reported_metrics
from rlite.evaluation.training import AnsweringEngine, InvalidEvaluations, stopping
from rlite.trainer.callbacks import Callback
from rlite.trainer.held_out import ACCURACIES, GeneratedOptions, prefixed
from rlite.trainer.losses import SftLoss
from rlite.trainer.run.observer import Observer, ReportedMetrics
from rlite.trainer.run.schedule import topic_of
from rlite.trainer.supervised import SupervisedTrainer


class SftTrainer(SupervisedTrainer[SftConfig]):
    """Trainer on demonstrations (`rlite.data.sft.sft_rows`), by cross entropy.

    Args:
        options: the trainer's config.
        rows: items to train on.
        test_rows: items whose loss is evaluated, or such items by the names of sets.
        callbacks: callbacks besides those of `trainer.callbacks`.
        generated: sets of prompts that the model answers, by name.

    Raises:
        ConfigError: an option cannot work.
    """

    name = "sft"
    config_class = SftConfig
    tokenise = sft_rows
    kind = "demonstrations"
    shown = ("loss", "seconds", "tokens_per_second", "lr", "grad_norm", "num_tokens")

    def __init__(
        self,
        options: SftConfig,
        rows: TokenRows,
        test_rows: TokenRows | Mapping[str, TokenRows] | None = None,
        callbacks: Sequence[Callback] = (),
        generated: Mapping[str, EvaluationSet] | None = None,
    ) -> None:
        self.generated = generated or {}
        super().__init__(options, rows, test_rows, callbacks)
        self.generated = {name: stopping(each, self._new_end_ids) for name, each in self.generated.items()}
        self.generation = AnsweringEngine(
            options.generation, options.actor.model_name, options.trainer.seed, self.engine, self.generated
        )
        model = options.actor.model_name if self.generated else ""
        self.record = EvaluationRecord(options.trainer, self.run, model)
        sets = {name: own for name, own in options.test_data.items() if own.is_generated}
        self.invalid = InvalidEvaluations(sets, self.run)
        self.answered: list[Evaluation] = []
        """newest evaluations by answers"""

    def make_loss(self) -> SftLoss:
        """Return the cross entropy."""
        return SftLoss(avg_level=self.options.actor.avg_level)

    def reported_metrics(self) -> ReportedMetrics:
        """Return the names of the metrics that the run shows: losses, and metrics of answers."""
        losses, answers = super().reported_metrics(), reported_metrics(self.generated, ACCURACIES)
        names = ("headlines", "compared", "evaluated")
        return replace(losses, **{name: [*getattr(losses, name), *getattr(answers, name)] for name in names})

    def start(self) -> None:
        """Begin as every trainer does, then place the engine that answers prompts, if there are some."""
        super().start()
        self.generation.build()

    def observers(self) -> Sequence[Observer]:
        """Return who observes the run, with the record of answers."""
        return assembly.make_observers(self, self._repeated, self.record)

    def evaluation_plan(self) -> dict[str, str]:
        """Return what is evaluated and when, as text by topic."""
        own, test_freq = self.options.test_data, self.options.trainer.test_freq
        answers = {
            topic_of(name): each.plan(own.get(name, GeneratedOptions()), test_freq)
            for name, each in self.generated.items()
        }
        return super().evaluation_plan() | answers

    def evaluate_due(self) -> dict[str, float]:
        """Return the metrics of the sets that are due after this step."""
        metrics, self.answered = super().evaluate_due(), []
        due = [each for name, each in self.generated.items() if self.schedule.is_due(name)]
        if due and not self.run.is_interrupted:
            found = self.generation.evaluate(due, self.run.step, lambda: self.run.is_interrupted)
            self.run.answered(self.run.step, found)
            for each in found:
                metrics |= prefixed(each.set.name, each.metrics)
            self.schedule.mark(each.set.name for each in found)
            self.answered = [each.without_episodes() for each in found]
        return metrics

    def without_invalid(self, evaluation: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics of the newest evaluations without those of which too many episodes have failed."""
        return self.invalid.without(evaluation, self.answered, self.generation.first_losses)

    @property
    def set_names(self) -> list[str]:
        """The names of the sets that the run evaluates, by losses or by answers."""
        return [*super().set_names, *self.generated]

    @classmethod
    def read_further(cls, options: SftConfig, given: ProgramObjects) -> dict[str, Any]:
        """Return the sets whose prompts the model answers.

        Args:
            options: the trainer's config.
            given: objects of a program, in place of what the options name.
        """
        sets = {name: own for name, own in options.test_data.items() if own.is_generated}
        tokens = options.generation.max_new_tokens
        return {"generated": read_generated(sets, options.data, options.actor.model_name, tokens, given)}

    def describe_loss(self) -> str:
        """Return the loss in words."""
        return f"cross entropy, mean per {self.options.actor.avg_level}"


main = SftTrainer.main
