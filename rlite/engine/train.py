"""The train engine: a user's module, sharded over workers, called as if it were local."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlite.algorithms.logprobs import OnLogprobs
from rlite.algorithms.reduce import Loss, Weight
from rlite.data.packs import BatchShare, join_values, sequence_lengths, split_batch
from rlite.engine.learning import LearningEngine
from rlite.engine.registry import TrainWorker
from rlite.engine.weights import OnInflight, SyncReport, sync_weights
from rlite.runtime.parallel.host_memory import DeviceUsage
from rlite.runtime.replicas.engine import Engine


class RliteTrainEngine(LearningEngine):
    """Trains a user-defined module; the module's methods are the engine's methods.

    A method's arguments are copied to every data-parallel rank, and arguments in `NeedParallel` are split. The result
    is a list with one entry per rank, unless the method is marked with `@gathered(...)`. `build` takes these sizes:

        data_parallel_size                   copies of the model
        tensor_parallel_size                 workers that hold one copy: fsdp x sp_size x tp_size
        tp_size, sp_size (default 1)         workers of one copy that share every matrix, and the tokens of every pack

    Gradients are averaged over the copies and fsdp, the ranks with data of their own. On 16 devices,
    `build(tensor_parallel_size=8, data_parallel_size=2, tp_size=4)` is 2 copies x 2 fsdp x 4 tensor, and without
    `tp_size` 2 copies x 8 fsdp.

    Args:
        module: a `BaseTrainModule` on the meta device.
        executor: name of the parallel backend; "fsdp2".
    """

    @property
    def dims(self) -> Any:
        """Division of work over the workers: a `WorkLayout`. The executor "fsdp2" has a `ParallelDims`."""
        return self._backend.layout(len(self.group), self.copies[0].size, self.options)

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks over which batches are split."""
        return self.dims.num_data_ranks

    # -- atomic operations ---------------------------------------------------------------------------------------

    def train(self) -> None:
        """Put the module into training mode, its initial mode.

        `forward` and `eval_batch` leave the mode temporarily.
        """
        self._workers.call(TrainWorker.set_mode, True)

    def eval(self) -> None:
        """Put the module into evaluation mode."""
        self._workers.call(TrainWorker.set_mode, False)

    def train_batch(
        self,
        batch: Mapping[str, Tensor],
        loss_fn: Loss,
        loss_weight_fn: Weight | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """Make one optimizer step on a batch.

        The batch is balanced by tokens over ranks and packed into microbatches of at most `max_tokens_per_microbatch`.
        Previously accumulated gradients of the module are dropped.

        Args:
            batch: right-padded TensorDict or dict: `input_ids`, `attention_mask` [N, L]; other keys [N, L, ...] or [N].
                Rows of equal `pair_ids` [N], if present, share one microbatch, in the batch's order.
            loss_fn: (logits [T, V], data) -> a mean, or (mean, dict of what to report). A reported number has the
                weight of the loss, an `rlite.algorithms.Mean` the number of its own elements, and an
                `rlite.algorithms.PerToken` holds values of the tokens [T]. `data` holds the batch's
                keys packed ([T, ...] and [n]) and `cu_seqlens` [n + 1], `position_ids` [T], `max_seqlen`. A loss_fn
                marked with `rlite.algorithms.on_logprobs` gets log-probabilities and entropies [T], and no logits are
                kept.
            loss_weight_fn: data -> weight of the microbatch's mean, e.g. its number of action tokens. None: the loss is
                a sum, so that gradients and `loss` add up over microbatches, and `weight` is their number.
            adapter: an adapter of `add_adapter` that computes and learns; None is the module.

        Returns:
            The batch's `loss`, the means that loss_fn reports, `grad_norm`, `lr`, `weight`, `num_tokens`,
                `num_microbatches` per rank, and `is_skipped`. `is_skipped` is 1 if no step was made, because the weight
                is 0, or the loss or a gradient is not finite. `shared_tokens`, if there are any, is the share of tokens
                that were computed once with another sequence (option `share_prefixes`). A `PerToken` that loss_fn
                reports is there as [N, L], padded with 0, if the executor returns values of tokens and the weight is
                not 0.

        Raises:
            DataError: the batch has another form, or a sequence is longer than a microbatch.
        """
        self._begin_training("train_batch", adapter)
        return self._atomic(TrainWorker.train_batch, batch, loss_fn, loss_weight_fn, adapter)

    def forward(
        self,
        batch: Mapping[str, Tensor],
        post_hook: Callable[..., Tensor],
        max_tokens_per_microbatch: int | None = None,
        without_adapters: bool = False,
        adapter: str | None = None,
    ) -> Tensor:
        """Apply `post_hook(logits [T, V], data) -> [T, ...]` to a batch, without gradients.

        The module is in evaluation mode meanwhile, so dropout is off.

        Args:
            batch: as for `train_batch`.
            post_hook: function of each pack; it may be marked with `on_logprobs`, as a loss_fn may.
            max_tokens_per_microbatch: size of microbatches; None is the engine's. Without gradients they may be larger.
            without_adapters: switch the adapters of a LoRA module off, so that the initial model computes.
            adapter: an adapter of `add_adapter` that computes; None is none of them.

        Returns:
            Values [N, L, ...], padded with 0.
        """
        shares = self.shares("forward", batch, post_hook, max_tokens_per_microbatch)
        calls = [(share, post_hook, without_adapters, *self._named("forward", adapter)) for share in shares]
        results = self._ask_each(TrainWorker.forward, calls)
        return join_values("forward", shares, results, batch["attention_mask"])

    def prefix_obstacle(self) -> str | None:
        """Return why tokens with which sequences of a microbatch begin alike are not computed once; None if they are.

        A loss or post_hook on logits gets every sequence whole: logits of all tokens would take most memory.
        """
        cls = type(self.module)
        if cls not in self._obstacles:
            self._obstacles[cls] = self._backend.prefix_obstacle(self.module, self.options)
        return self._obstacles[cls]

    def device_usage(self) -> list[DeviceUsage]:
        """Return each worker's device and the peak memory of its process there since the last call."""
        return self._workers.call(TrainWorker.device_usage)

    def step_lr_scheduler(self) -> float:
        """Advance the module's learning-rate schedule by one step.

        Returns:
            The new learning rate.
        """
        return self._ask_each(TrainWorker.step_lr_scheduler, [()] * self.num_data_ranks)[0]

    def p2p_weight_sync(
        self, target: Engine, on_inflight: OnInflight = "continue", verify_checksums: bool = False
    ) -> SyncReport:
        """Write this engine's weights into `target` and raise its policy version by one.

        Args:
            target: an inference engine, or a train engine, with its weights on the device.
            on_inflight: "continue" resumes generation in flight from its tokens, with a recomputed cache; "abort" ends
                it with stop_reason "abort".
            verify_checksums: compare every tensor at both ends afterwards.

        Returns:
            The report of the sync.

        Raises:
            ResidencyError: weights are not on the device.
            WeightSyncError: a tensor does not match. The target then refuses to serve.
        """
        self._need_weights("p2p_weight_sync")
        report = sync_weights(self, target, on_inflight, verify_checksums)
        target.base_id = self.base_id if self.module.lora is None else self._base_of_merged(target)
        return report

    def _named(self, what: str, adapter: str | None) -> tuple[str, ...]:
        """Return the argument of a worker's method that names an adapter, if one is named."""
        return () if adapter is None else (self._check_adapter(what, adapter),)

    def _begin_training(self, what: str, adapter: str | None) -> None:
        if self._adapters:
            self._check_learner(what, adapter)
        if adapter is None and self.module.lora is None:
            self.base_id = ""

    def _atomic(self, method: Any, batch: Mapping[str, Tensor], *functions: Any) -> dict[str, Any]:
        shares = self.shares(method.__name__, batch, functions[0])
        given = (*functions[:-1], *self._named(method.__name__, functions[-1]))
        results = self._ask_each(method, [(share, *given) for share in shares])
        stats = dict(results[0])
        for name in {name for result in results for name, value in result.items() if isinstance(value, Tensor)}:
            values = [result.get(name, torch.empty(0)) for result in results]
            stats[name] = join_values(name, shares, values, batch["attention_mask"])
        num_tokens, num_shared = float(sum(sequence_lengths(batch))), sum(share.num_shared for share in shares)
        if num_shared:
            stats["shared_tokens"] = num_shared / num_tokens
        return {**stats, "num_microbatches": float(len(shares[0].microbatches)), "num_tokens": num_tokens}

    def shares(
        self, what: str, batch: Mapping[str, Tensor], function: Callable[..., Any], max_tokens: int | None = None
    ) -> list[BatchShare]:
        """Return the rows and microbatches of each data rank.

        Args:
            what: name of the call, for errors.
            batch: the batch.
            function: the loss, or what a forward pass computes.
            max_tokens: tokens of a microbatch on one device; default: that of `build`.

        Raises:
            ResidencyError: weights are not on the device.
        """
        self._need_weights(what)
        is_narrow = isinstance(function, OnLogprobs) or self.module.has_narrow_outputs
        capacity = (max_tokens or self.options.max_tokens_per_microbatch) * self.dims.pack_factor
        costs = None if self.options.balance_by == "tokens" else self._flops
        may_share = (lambda: self.prefix_obstacle() is None) if is_narrow else None
        return split_batch(what, batch, self.num_data_ranks, capacity, costs, self.options.packing_method, may_share)

    def _ask_each(self, method: Callable[..., Any], calls: Sequence[tuple], **options: Any) -> list[Any]:
        """Return the result of every data rank; see `WorkerSet.ask_each`."""
        return self._workers.ask_each(method, calls, self.dims.num_peers, **options)

    def _num_peers(self) -> int:
        return self.dims.num_peers
