"""The seam of training backends: what a `RliteTrainEngine` asks of the workers behind it.

A backend is a `TrainBackend` that is registered under a name. Each of its workers is a `TrainExecutor`: one rank that
holds a part of the user's module. All ranks get the same calls in the same order. `TrainBackend.layout` says how the
ranks divide a batch, and `Backend.ranks` which of the ranks that share the work on the same rows receive arguments, and
whose result counts. A rank that receives nothing is called too, with None for each argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from rlite.engine.batch_shares import BatchShare
from rlite.engine.registry import Backend
from rlite.engine.workers import SourceWorker
from rlite.nn.base import BaseTrainModule
from rlite.parallel.usage import DeviceUsage

Loss = Callable[[Any, dict[str, Any]], Any]
"""loss_fn(logits [T, V], data) -> mean loss, or (mean loss, dict of means to report, numbers or `Mean`); an OnLogprobs
gets log-probabilities and entropies [T] instead of logits"""
Weight = Callable[[dict[str, Any]], Any]
"""loss_weight_fn(data) -> what the mean of this pack counts, e.g. its number of action tokens"""


class WorkLayout(Protocol):
    """Division of a batch over an engine's ranks: `num_peers` neighbouring ranks make one data rank."""

    @property
    def num_data_ranks(self) -> int:
        """Parts into which the rows of a batch are split."""
        ...

    @property
    def num_peers(self) -> int:
        """Neighbouring ranks that work on one part together."""
        ...

    @property
    def seq(self) -> int:
        """Pieces into which the peers cut the sequences of an argument in `NeedParallel(type="seq")`."""
        ...

    @property
    def pack_factor(self) -> int:
        """Multiple of `max_tokens_per_microbatch` that a microbatch may hold because peers share its activations."""
        ...


class TrainOptions(Protocol):
    """Options that the engine itself reads, beside the backend's own."""

    @property
    def max_tokens_per_microbatch(self) -> int:
        """Most tokens in one forward, for each rank that shares the activations."""
        ...

    @property
    def balance_by(self) -> str:
        """What data ranks share evenly: "tokens", or "flops" (`sequence_flops`)."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainBackend(Backend):
    """A training backend as `register_executor("train", name, backend)` takes it.

    `options` is a `TrainOptions`, and `worker` makes a `TrainExecutor` from the pickled module.
    """

    layout: Callable[[int, int, Any], WorkLayout]
    """layout(num_workers, workers per copy of the model, options); raises ConfigError for sizes that cannot be"""
    check_module: Callable[[BaseTrainModule, Any], None] | None = None
    """check_module(module, options) in the driver, before any process starts; raises ConfigError"""


class TrainExecutor(SourceWorker, Protocol):
    """One rank of a train engine."""

    # -- atomic operations ---------------------------------------------------------------------------------------

    def forward_backward(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, float]:
        """Accumulate the gradients of a batch, without a step.

        After any number of calls the gradients are those of the weighted mean over all microbatches since the last
        step. A batch without weight changes nothing. If `loss_fn` raises, all that was accumulated is dropped.

        Args:
            share: this data rank's rows and microbatches. An empty microbatch is filled up at weight zero, because
                every rank takes part in every collective.
            loss_fn: the loss of a pack, a mean.
            loss_weight_fn: what the mean of a pack counts.

        Returns: over all ranks: the weighted means of the loss and of what loss_fn reports, and `weight`.
        """
        ...

    def optimizer_step(self) -> dict[str, float]:
        """Clip the accumulated gradients, make one optimizer step, and forget the gradients.

        Returns: `grad_norm`, `lr`, `weight` (of all that was accumulated) and `is_skipped`: 1 if there was no step,
            because there is no gradient, or a loss or a gradient is not finite.
        Raises: ConfigError if the module has no optimizer.
        """
        ...

    def train_batch(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, float]:
        """Drop what was accumulated, then `forward_backward` and `optimizer_step`.

        Args:
            share: as for `forward_backward`.
            loss_fn: as for `forward_backward`.
            loss_weight_fn: as for `forward_backward`.

        Returns: what the two return.
        """
        ...

    def eval_batch(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, float]:
        """Return the means of `forward_backward`, in evaluation mode and without gradients.

        Args:
            share: as for `forward_backward`.
            loss_fn: as for `forward_backward`.
            loss_weight_fn: as for `forward_backward`.
        """
        ...

    def forward(self, share: BatchShare, post_hook: Callable[..., Tensor], without_adapters: bool) -> dict[int, Tensor]:
        """Apply `post_hook(logits [T, V], data) -> [T, ...]` in evaluation mode, without gradients.

        Args:
            share: as for `forward_backward`.
            post_hook: what is computed of each pack.
            without_adapters: switch the module's adapters off meanwhile.

        Returns: the values of each row of the share on CPU, padded with 0 to its width.
        """
        ...

    def invoke(self, args: tuple, kwargs: dict, method: str) -> Any:
        """Call a method of the user's module.

        Args:
            args: its positional arguments.
            kwargs: its keyword arguments.
            method: its name.
        """
        ...

    def set_mode(self, is_training: bool) -> None:
        """Put the module into training or evaluation mode."""
        ...

    def step_lr_scheduler(self) -> float:
        """Advance the module's `lr_scheduler` and return the new learning rate. Raises: ConfigError without one."""
        ...

    # -- weights and state ---------------------------------------------------------------------------------------

    def load(self, path: str | None) -> None:
        """Read the weights from a Hugging Face folder; None is the module's own source."""
        ...

    def save(self, path: str) -> None:
        """Write a Hugging Face checkpoint, whole or not at all.

        Raises: CheckpointError on a rank that could not write it.
        """
        ...

    def export_values(self) -> dict[str, tuple[tuple[slice, ...], tuple[int, ...], Tensor]]:
        """Return copies of this rank's served boxes on CPU: name -> (box, global shape, values)."""
        ...

    def save_state(self, folder: str, path: str, facts: dict[str, Any], is_asynchronous: bool) -> None:
        """Write all that resume needs: weights, optimizer, scheduler, accumulated gradients, random numbers.

        Args:
            folder: where every rank writes; the driver has made it, with a file of its own in it.
            path: what the folder is renamed to when it is whole and sealed (`rlite.checkpoint.atomic`).
            facts: what JSON can hold; sealed with it.
            is_asynchronous: copy the state and return; write while training goes on.

        Raises: CheckpointError, unless it is asynchronous.
        """
        ...

    def has_saved(self) -> bool:
        """Return whether `finish_saving` would not have to wait."""
        ...

    def finish_saving(self) -> None:
        """Wait until the last `save_state` is written. Raises: CheckpointError if it could not be."""
        ...

    def load_state(self, path: str) -> None:
        """Resume from what `save_state` wrote, with any number of ranks that the backend allows.

        Raises: CheckpointError if it does not fit; then nothing was changed.
        """
        ...

    # -- health --------------------------------------------------------------------------------------------------

    def nonfinite_parameters(self) -> list[str]:
        """Return the names of parameters of which this rank's part holds NaN or infinity."""
        ...

    def device_usage(self) -> DeviceUsage:
        """Return this rank's device and the most memory that its process held there since the last call."""
        ...
