"""Shared parts of the trainers that learn from rows (sft, rm, dpo)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from tensordict import TensorDict
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import rlite
from rlite.data.loader import BatchLoader
from rlite.data.packs import sequence_lengths
from rlite.data.tables import read_rows
from rlite.data.tokens import TokenRows
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError
from rlite.nn.huggingface import local_checkpoint
from rlite.observability import stats_tracker
from rlite.trainer.options import DataOptions, EpochOptions, LaunchOptions, ModelOptions
from rlite.trainer.rl.engines import init_devices
from rlite.trainer.run.run import TrainingRun, check_best_metric, step_metrics


class BatchLoss(Protocol):
    """A loss on packs, with further metrics and the weight of its mean."""

    reported: ClassVar[tuple[str, ...]]

    def __call__(self, outputs: Any, data: Any, /) -> Any:
        """Return the mean loss of a pack, or (mean, dict of metrics)."""

    def weight(self, data: Mapping[str, Any]) -> Tensor:
        """Return the weight of a pack's mean."""


class SupervisedRun:
    """One model, its data and its run; the trainers' loops use it phase by phase.

    Needs a session: call `rlite.init()` first.

    Args:
        options: the whole config, which is saved with the run.
        key: key of the model in it, "actor" or "critic".
        data: options of the data.
        trainer: options of the run.
        engine: the trained engine.
        loss: the loss to minimise.
        rows: training rows.
        test_rows: rows for evaluation.
        shown: metrics for the console.
    """

    def __init__(
        self,
        options: Any,
        key: str,
        data: DataOptions,
        trainer: EpochOptions,
        engine: RliteTrainEngine,
        loss: BatchLoss,
        rows: TokenRows,
        test_rows: TokenRows | None,
        shown: Sequence[str],
    ) -> None:
        model: ModelOptions = getattr(options, key)
        self.options, self.model, self.engine, self.loss = trainer, model, engine, loss
        self.rows, self.test_rows, self._batch_size = rows, test_rows, data.batch_size
        self._lengths: list[int] = []
        check_best_metric(trainer, test_rows is not None, [f"test_{name}" for name in ("loss", *loss.reported)])
        self.loader = BatchLoader(rows, data.batch_size, trainer.seed, trainer.n_epochs)
        self.run = TrainingRun(trainer, options, shown, self.loader.num_batches, has_absolute_loss=True)
        try:
            self.build_options = model.build_options(len(rlite.current_session().devices), trainer.seed)
        except ConfigError as error:
            sizes = ", ".join(f"{key}.{name}={getattr(model, name)}" for name in ("ddp_size", "sp_size", "tp_size"))
            raise ConfigError(f"{sizes}: {error}") from error
        for table, its_rows in (("data", rows), ("test_data", test_rows)):
            if its_rows is not None:
                capacity = model.max_length_per_device * model.tp_size * model.sp_size
                its_rows.check_capacity(capacity, _capacity_name(key, model), table)

    def start(self, title: str) -> None:
        """Build the engine, resume if asked, and report the plan."""
        self.engine.build(**self.build_options)
        facts = self.run.restore(self.engine)
        if facts:
            self.loader.load_state_dict(facts["loader"])
            self.run.total_steps = self.run.step + self.loader.num_left  # another batch_size makes others
        self.run.open()
        self.run.console.report(title, self.plan())
        self.engine.train()

    def plan(self) -> dict[str, str]:
        """Return how a step's work is divided, as text by topic."""
        session, dims, model = rlite.current_session(), self.engine.dims, self.model
        lengths = self.rows.lengths
        num_items = min(self._batch_size, len(self.rows))
        batch_tokens = num_items * self.rows.rows_per_item * lengths.mean()
        return {
            "model": f"{model.model_name}, {self.engine.num_parameters / 1e6:.2f} M parameters",
            "devices": f"{len(session.devices)} x {session.device}, launcher {session.launcher.kind} = {dims}",
            "data": f"{len(self.rows)} items of {lengths.mean():.0f} tokens on average, at most {lengths.max()}; "
            f"{self.rows.tally}",
            "step": f"{num_items} items, about {batch_tokens:.0f} tokens over {dims.num_data_ranks} data "
            f"rank(s), in packs of at most {model.max_length_per_device * dims.pack_factor} tokens",
            "run": f"{self.options.n_epochs} epoch(s) of {len(self.loader)} steps = {self.run.total_steps}, "
            f"checkpoint every {self.options.save_freq}, in {self.options.save_dir}",
        }

    def batches(self) -> Iterator[TensorDict]:
        """Return an iterator over the remaining batches."""
        return iter(self.loader)

    @stats_tracker.record_timing("update")
    def train_batch(self, batch: TensorDict) -> dict[str, float]:
        """Make one optimizer step and one step of the learning rate.

        Returns:
            The batch's statistics.
        """
        self._lengths = sequence_lengths(batch)
        stats = self.engine.train_batch(batch, self.loss, self.loss.weight)
        self.engine.step_lr_scheduler()
        return stats

    def finish_step(self, stats: Mapping[str, float], prepare: Any = None) -> dict[str, float]:
        """Count the step, evaluate and save if due, and log.

        Args:
            stats: the batch's statistics.
            prepare: adds keys to a batch before evaluation.

        Returns:
            The step's metrics.
        """
        self.run.step += 1
        metrics = {**stats, **step_metrics(self.engine, self._lengths)}
        if self.test_rows is not None and self.run.is_due(self.options.test_freq):
            metrics |= (evaluation := self.evaluate(prepare))
            self.run.save_best(self.engine, evaluation)
        self.run.log(metrics)
        if self.run.is_save_due():
            self.run.save(self.engine, loader=self.loader.state_dict())
        return metrics

    def close(self) -> None:
        """Close the metric sinks and the progress bar."""
        self.run.close()

    def evaluate(self, prepare: Any = None) -> dict[str, float]:
        """Return means of the loss and its metrics over the test rows, as `test_...`.

        `prepare` adds keys to a batch.
        """
        assert self.test_rows is not None
        sums: dict[str, float] = {}
        total = 0.0
        for batch in self.test_rows.batches(self._batch_size):
            stats = self.engine.eval_batch(prepare(batch) if prepare else batch, self.loss, self.loss.weight)
            total += stats["weight"]
            for key in stats.keys() - {"weight", "num_tokens", "num_microbatches"}:
                sums[key] = sums.get(key, 0.0) + stats[key] * stats["weight"]
        return {f"test_{key}": value / total for key, value in sums.items()}


def read_tokens(
    options: Any, model_name: str, tokenise: Callable[..., TokenRows]
) -> tuple[TokenRows, TokenRows | None]:
    """Return the token rows of options.data and, if given, of options.test_data.

    Args:
        options: the trainer's config.
        model_name: checkpoint with the tokenizer.
        tokenise: `sft_rows` or `preference_rows`.
    """
    tokenizer = load_tokenizer(model_name)

    def rows(key: str, path: str) -> TokenRows:
        escapes = {"escape_special_tokens": True} if options.data.escape_special_tokens else {}
        return tokenise(read_rows(path, key), tokenizer, options.data.max_length, f"{key}={path}", **escapes)

    test_path = options.test_data.path
    return rows("data.path", options.data.path), rows("test_data.path", test_path) if test_path else None


def num_steps(options: Any, rows: TokenRows) -> int:
    """Return the optimizer steps of the whole run."""
    return BatchLoader(rows, options.data.batch_size, n_epochs=options.trainer.n_epochs).num_batches


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint."""
    return AutoTokenizer.from_pretrained(local_checkpoint(path, weights=False), trust_remote_code=False)


def serve_if_worker(launch: LaunchOptions) -> None:
    """Under torchrun, let ranks other than 0 serve and exit: only rank 0 reads data."""
    if int(os.environ.get("RANK", "0")) > 0 and launch.launcher in (None, "torchrun"):
        init_devices(launch.launcher, launch.num_devices)


def _capacity_name(key: str, model: ModelOptions) -> str:
    sizes = [f" x {name}" for name in ("sp_size", "tp_size") if getattr(model, name) > 1]
    return f"{key}.max_length_per_device{''.join(sizes)}"
