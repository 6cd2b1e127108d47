"""The train engine: a user's module, sharded over workers, called as if it were here."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import torch
from torch import Tensor, nn

from rlite.checkpoint.atomic import staging, verify
from rlite.checkpoint.randomness import random_state, set_random_state
from rlite.checkpoint.safe import load_values
from rlite.cluster.group import WorkerGroup
from rlite.cluster.session import current_session
from rlite.data.packing import plan_microbatches, sequence_flops
from rlite.data.packs import check_batch, companions, sequence_lengths
from rlite.dispatch import cuts_sequences, gather, gather_of, plan_shares, scatter
from rlite.engine.base import Engine, Weights
from rlite.engine.registry import Kind
from rlite.engine.weight_sync import OnInflight, SyncReport, sync_weights
from rlite.errors import CheckpointError, ConfigError, DataError, RliteError, why_not_written
from rlite.nn.base import BaseTrainModule, is_on_meta
from rlite.nn.huggingface import local_checkpoint
from rlite.nn.liger import check_liger
from rlite.parallel.mesh import ParallelDims
from rlite.parallel.usage import DeviceUsage

logger = logging.getLogger(__name__)

DRIVER_STATE = "driver.pt"
"""the driver's random numbers, in a checkpoint"""


class RliteTrainEngine(Engine):
    """Trains a module that you define; its methods are the engine's methods.

    Args:
        module: a `BaseTrainModule` on the meta device.
        executor: how it is parallelised; "fsdp2".

    A method's arguments are copied to every rank with data of its own, those in `NeedParallel` are split; the result
    is a list with one entry per rank, unless the method says `@gathered(...)`. Of the sizes that `build` takes,

        data_parallel_size                   copies of the model
        tensor_parallel_size                 workers that hold one copy: fsdp x sp_size x tp_size
        tp_size, sp_size (1 if not given)    of those, workers that share every matrix, and the tokens of every pack

    Gradients are averaged over the copies and fsdp, the ranks with data of their own. On 16 devices,
    `build(tensor_parallel_size=8, data_parallel_size=2, tp_size=4)` is 2 copies x 2 fsdp x 4 tensor, and without
    `tp_size` 2 copies x 8 fsdp.
    """

    kind: ClassVar[Kind] = "train"

    def __init__(self, module: nn.Module, executor: str = "fsdp2") -> None:
        super().__init__(executor)
        if not isinstance(module, BaseTrainModule):
            raise ConfigError(
                f"expected a rlite.nn.BaseTrainModule, found {type(module).__name__}: "
                "subclass it beside your model class, and move the algorithm into its methods"
            )
        own = _own_methods(type(module))
        if hidden := sorted(name for name in own if hasattr(RliteTrainEngine, name)):
            raise ConfigError(
                f"{type(module).__name__} defines {', '.join(hidden)}, which the engine has itself, so that yours "
                "would never be called; give your methods other names"
            )
        if taken := sorted(name for name, method in own.items() if "timeout" in inspect.signature(method).parameters):
            raise ConfigError(
                f"{type(module).__name__}: {', '.join(taken)} has a parameter 'timeout', which every call on an engine "
                "understands as seconds to wait for its workers; give yours another name"
            )
        if not is_on_meta(module):
            raise ConfigError(
                f"{type(module).__name__} holds real weights; a train module travels to its workers without any. "
                "Build it inside `with accelerate.init_empty_weights():`"
            )
        self.module = module
        self._writing: StateWriting | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The module's public methods, called on every data-parallel rank."""
        module = self.__dict__.get("module")
        method = getattr(type(module), name, None)
        if module is None or name.startswith("_") or not callable(method):
            raise AttributeError(
                f"{type(self).__name__} has no method {name!r}, and neither has its module {type(module).__name__}"
            )

        def call(*args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
            self._need_weights(name)
            dims = self.dims
            shares = plan_shares(args, kwargs, dims.num_data_ranks)
            calls = scatter(args, kwargs, dims.num_data_ranks, dims.seq, shares=shares)
            each: list[Any] = [((name, *call), {}) for call in calls for _ in range(dims.tensor)]
            # whoever has other tokens than its neighbours tells other numbers
            reporters = range(0, len(each), dims.tensor) if cuts_sequences(args, kwargs) else None
            results = self.group.call("invoke", each, timeout=timeout, what=name, reporters=reporters)
            return gather(results[:: dims.num_peers], gather_of(method), shares)

        call.__name__ = name
        call.__doc__ = method.__doc__
        return call

    @property
    def dims(self) -> ParallelDims:
        """How the workers divide the work."""
        size = len(self.executors[0].ranks)
        return ParallelDims.of(len(self.group), size, self.options.sp_size, self.options.tp_size)

    @property
    def num_data_ranks(self) -> int:
        """Ranks over which batches are split."""
        return self.dims.num_data_ranks

    @property
    def num_parameters(self) -> int:
        """Of the module, tied ones once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def device(self) -> torch.device:
        """Where the driver should keep batches for this engine."""
        return torch.device("cpu")

    def _validate(self, executor_size: int) -> None:
        try:
            ParallelDims.of(executor_size, executor_size, self.options.sp_size, self.options.tp_size)
        except ConfigError as error:
            raise ConfigError(f"tensor_parallel_size={executor_size}: {error}") from error
        self.module.check_architecture()
        if self.options.tp_size > 1:
            self.module.check_parallel(self.options.tp_size)
        if self.options.use_liger_kernel:
            check_liger(self.module, current_session().device)

    def _source(self) -> bytes:
        for parameter in self.module.parameters():
            # accelerate notes it there for tied parameters, and what was frozen since would arrive as it was before
            vars(parameter).pop("requires_grad", None)
        return cloudpickle.dumps(self.module)

    def _num_peers(self) -> int:
        return self.dims.num_peers

    def _built(self) -> None:
        assert self._session is not None
        self._session.before_release(self.name, self._before_release)

    def _before_release(self) -> None:
        """Let a checkpoint be written to its end; the workers end then, whatever becomes of it."""
        try:
            self._finish_saving()
        except (RliteError, OSError) as error:
            logger.error("%s: %s", self.name, error)
        except RuntimeError:  # at the interpreter's end there are no threads to ask; they have written what they had to
            pass

    # -- atomic operations ---------------------------------------------------------------------------------------

    def train(self) -> None:
        """Put the module into training mode, in which it is built; `forward` and `eval_batch` leave it for a while."""
        self.group.broadcast("set_mode", True)

    def eval(self) -> None:
        """Put the module into evaluation mode."""
        self.group.broadcast("set_mode", False)

    def train_batch(
        self, batch: Mapping[str, Tensor], loss_fn: Callable[..., Any], loss_weight_fn: Callable[..., Any]
    ) -> dict[str, float]:
        """One optimizer step over a batch.

        The batch is balanced by tokens over ranks and packed into microbatches of at most `max_tokens_per_microbatch`.

        Args:
            batch: right-padded TensorDict or dict: `input_ids`, `attention_mask` [N, L]; other keys [N, L, ...] or [N].
                Rows of equal `pair_ids` [N], if it has them, come into one microbatch, in the batch's order.
            loss_fn: (logits [T, V], data) -> a mean, or (mean, dict of means to report). A reported number counts as
                much as the loss does, an `rlite.algorithms.Mean` its own elements. `data` holds the batch's keys packed
                ([T, ...] and [n]) and `cu_seqlens` [n + 1], `position_ids` [T], `max_seqlen`. One marked with
                `rlite.algorithms.on_logprobs` gets log-probabilities and entropies [T], and no logits are kept.
            loss_weight_fn: data -> what the microbatch's mean counts, e.g. its number of action tokens.

        Returns: the batch's `loss`, what loss_fn reports, `grad_norm`, `lr`, `weight`, `num_tokens`,
            `num_microbatches` per rank; `is_skipped` is 1 if no step was made, because the weight is 0, or the loss
            or a gradient is not finite.
        Raises: DataError for a batch of another form, or a sequence longer than a microbatch.
        """
        return self._atomic("train_batch", batch, loss_fn, loss_weight_fn)

    def eval_batch(
        self, batch: Mapping[str, Tensor], loss_fn: Callable[..., Any], loss_weight_fn: Callable[..., Any]
    ) -> dict[str, float]:
        """The loss of a batch, as in train_batch, without a step. The module is in evaluation mode meanwhile."""
        return self._atomic("eval_batch", batch, loss_fn, loss_weight_fn)

    def forward(
        self,
        batch: Mapping[str, Tensor],
        post_hook: Callable[..., Tensor],
        max_tokens_per_microbatch: int | None = None,
        without_adapters: bool = False,
    ) -> Tensor:
        """Apply `post_hook(logits [T, V], data) -> [T, ...]` to a batch; returns [N, L, ...], padded with 0.

        The module is in evaluation mode meanwhile, so that dropout is off. A post_hook may be marked with
        `on_logprobs`, as a loss_fn may. Without gradients to keep, microbatches may be
        larger than in training: `max_tokens_per_microbatch` says how large, where it is not as the engine was built.
        `without_adapters` switches a LoRA module's adapters off meanwhile: what is left is the model that it began as.
        """
        plan, calls = self._plan("forward", batch, max_tokens_per_microbatch)
        results = self._on_data_ranks("forward", calls, post_hook, without_adapters)
        first = next(value for part in results for value in part.values())
        padded = first.new_zeros(*batch["input_ids"].shape, *first.shape[1:])
        for rows, values in zip(plan, results, strict=True):
            for local, value in values.items():
                padded[rows[local], : len(value)] = value  # as wide as its rank's longest row
        return padded

    def nonfinite_parameters(self) -> list[str]:
        """Return the names of parameters that hold NaN or infinity, on any worker."""
        return sorted({name for names in self.group.broadcast("nonfinite_parameters") for name in names})

    def device_usage(self) -> list[DeviceUsage]:
        """Each worker's device and the most memory that its process held there since the last call."""
        return self.group.broadcast("device_usage")

    def step_lr_scheduler(self) -> float:
        """Advance the module's learning-rate schedule; returns the new rate."""
        return self.group.broadcast("step_lr_scheduler")[0]

    def _atomic(self, method: str, batch: Mapping[str, Tensor], *functions: Callable[..., Any]) -> dict[str, float]:
        _, calls = self._plan(method, batch)
        stats = self._on_data_ranks(method, calls, *functions)[0]
        num_tokens = float(sum(sequence_lengths(batch)))
        return {**stats, "num_microbatches": float(len(calls[0][1])), "num_tokens": num_tokens}

    def _on_data_ranks(self, method: str, calls: Sequence[tuple], *common: Any) -> list[Any]:
        """Call a worker method with each data rank's arguments, on all who share its work; one result for each."""
        num_peers = self.dims.num_peers
        each: list[Any] = [((*call, *common), {}) for call in calls for _ in range(num_peers)]
        return self.group.call(method, each)[::num_peers]

    def _plan(
        self, what: str, batch: Mapping[str, Tensor], max_tokens: int | None = None
    ) -> tuple[list[list[int]], list[tuple[dict, list]]]:
        """Rows of each rank, and each rank's (its part of the batch, its microbatches as rows of that part)."""
        self._need_weights(what)
        check_batch(batch)
        if len(batch["input_ids"]) == 0:
            raise DataError(f"{what}: the batch has no rows")
        lengths = sequence_lengths(batch)
        dims = self.dims
        plan = plan_microbatches(
            lengths,
            dims.num_data_ranks,
            (max_tokens or self.options.max_tokens_per_microbatch) * dims.num_peers,
            batch["pair_ids"].tolist() if "pair_ids" in batch else None,
            costs=self._costs(lengths),
        )
        rows_of, calls = [], []
        for microbatches in plan:
            rows = [row for microbatch in microbatches for row in microbatch] or companions(batch)  # for their shape
            local = {row: index for index, row in enumerate(rows)}
            width = max(lengths[row] for row in rows)
            index = torch.tensor(rows)
            full_width = batch["input_ids"].shape[1]
            part = {
                key: value[index][:, :width] if value.dim() > 1 and value.shape[1] == full_width else value[index]
                for key, value in batch.items()
            }
            rows_of.append(rows)
            calls.append((part, [[local[row] for row in microbatch] for microbatch in microbatches]))
        return rows_of, calls

    def _costs(self, lengths: Sequence[int]) -> list[float] | None:
        """What the rows' work is balanced by; None is their lengths."""
        if self.options.balance_by == "tokens":
            return None
        config = getattr(self.module, "config", None)
        if config is None:
            raise ConfigError("balance_by=flops: the module has no config that says how wide and deep it is")
        text = config.get_text_config()
        return [sequence_flops(length, text.hidden_size, text.num_hidden_layers) for length in lengths]

    # -- weights -------------------------------------------------------------------------------------------------

    def p2p_weight_sync(
        self, target: Engine, on_inflight: OnInflight = "continue", verify_checksums: bool = False
    ) -> SyncReport:
        """Write this engine's weights into `target` and raise its policy version by one.

        Args:
            target: an inference engine, or a train engine, with its weights on the device.
            on_inflight: what becomes of generation in flight: "continue" goes on from the tokens so far, with the cache
                computed again; "abort" ends it with stop_reason "abort".
            verify_checksums: compare every tensor at both ends afterwards.

        Raises: ResidencyError; WeightSyncError if a tensor does not match; the target then refuses to serve.
        """
        self._need_weights("p2p_weight_sync")
        return sync_weights(self, target, on_inflight, verify_checksums)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model on the driver's CPU, by parameter name; tied parameters once."""
        if self.weights in (Weights.EMPTY, Weights.RELEASED):
            self._need_weights("state_dict")
        one_copy = self.executors[0].ranks
        shards = self.group.call("export_values", [((), {})] * len(one_copy), ranks=one_copy)
        full: dict[str, Tensor] = {}
        for part in shards:
            for name, (box, global_shape, values) in part.items():
                if name not in full:
                    full[name] = torch.empty(global_shape, dtype=values.dtype)
                full[name][box] = values
        return full

    def save(self, path: str | Path) -> None:
        """Write a Hugging Face checkpoint that transformers opens, with the tokenizer of the original beside it.

        Weights are written in the `dtype` of the model's config, whatever the master weights have: `save_state` keeps
        those.
        """
        self._need_weights("save")
        self.group.broadcast("save", str(path))

    def load(self, path: str | Path | None = None) -> None:
        """Read weights from a Hugging Face checkpoint; without a path, from the module's own source.

        Raises: ConfigError for a folder that is not there; CheckpointError for one that does not fit: the engine then
            refuses to serve until a load or a sync succeeds, because a part of its weights may be written.
        """
        folder = None if path is None else str(local_checkpoint(path))
        if self.weights is Weights.HOST:
            self.cuda()
        self.weights = Weights.EMPTY
        self.group.broadcast("load", folder)
        self.weights = Weights.DEVICE

    def save_state(
        self, path: str | Path, asynchronous: bool = False, kept: Mapping[str, Any] | None = None, **facts: Any
    ) -> StateWriting:
        """Write a checkpoint to resume from: weights, optimizer, scheduler, gradients, random numbers of every rank.

        Whole or not at all: `path` is as it was until everything is written.

        Args:
            path: a folder on a file system that all workers and this process share.
            asynchronous: copy the state to host memory and write it while training goes on.
            kept: what the program keeps besides: plain values and tensors; load_state returns it among the facts.
            facts: what JSON can hold; load_state returns it.

        Returns: what to wait for; there is nothing to wait for unless it is asynchronous.
        Raises: CheckpointError, of this save or of the asynchronous one before.
        """
        self._need_weights("save_state")
        self._finish_saving()
        final = Path(path).absolute()
        try:
            folder = staging(final)
            with (folder / DRIVER_STATE).open("wb") as file:
                torch.save({"random": random_state(), "kept": dict(kept or {})}, file)
        except (OSError, RuntimeError) as error:  # torch.save makes either of a full disk
            raise CheckpointError(f"{final}: could not be written: {why_not_written(error)}") from error
        self._writing = StateWriting(final, self.group)
        known = {"module": type(self.module).__name__, **facts}
        self.group.broadcast("save_state", str(folder), str(final), known, asynchronous)
        return self._writing

    def _finish_saving(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None and not writing.is_known:
            writing.result()

    def load_state(self, path: str | Path) -> dict[str, Any]:
        """Resume from what save_state wrote, with any number of workers in any layout; returns its facts.

        Raises: DamagedCheckpointError; CheckpointError if it is of another module. Then nothing was changed.
        """
        if self.weights is not Weights.EMPTY:
            self._need_weights("load_state")
        self._finish_saving()
        folder = Path(path).absolute()
        facts = verify(folder)
        if facts.get("module") != type(self.module).__name__:
            raise CheckpointError(
                f"{folder}: saved from {facts.get('module')}, this engine has {type(self.module).__name__}"
            )
        driver = load_values(folder / DRIVER_STATE)
        self.weights = Weights.EMPTY  # until all of it is read
        self.group.broadcast("load_state", str(folder))
        self.weights = Weights.DEVICE
        set_random_state(driver["random"])
        return {**facts, **driver["kept"]}


class StateWriting:
    """A checkpoint that workers write while training goes on."""

    def __init__(self, path: Path, group: WorkerGroup) -> None:
        self.path = path
        self._group = group
        self._error: CheckpointError | None = None
        self.is_known = False
        """whether somebody has heard what became of it"""

    def done(self) -> bool:
        """Whether it is written, or could not be; does not wait for that."""
        return self.is_known or all(self._group.broadcast("has_saved"))

    def result(self, timeout: float | None = None) -> Path:
        """Wait until it is written; returns where it is. The engine's other calls wait, too.

        Raises: CheckpointError if it could not be written; what a worker raises; CallTimeout.
        """
        if not self.is_known:
            try:
                self._group.broadcast("finish_saving", timeout=timeout)
            except CheckpointError as error:
                self._error = error
            self.is_known = True
        if self._error is not None:
            raise self._error
        return self.path


def _own_methods(module: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Public methods that the user's own classes define.

    What modules have anyway (`forward`, `train`, `state_dict`) may be overridden: workers and torch call it.
    """
    own = [cls for cls in module.__mro__ if cls.__module__.partition(".")[0] not in ("torch", "transformers", "rlite")]
    defined = {name: value for cls in reversed(own) for name, value in vars(cls).items() if callable(value)}
    return {
        name: value
        for name, value in defined.items()
        if not name.startswith("_") and not hasattr(BaseTrainModule, name)
    }
