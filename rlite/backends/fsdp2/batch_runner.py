"""Microbatches of one rank: gradients, optimizer steps and evaluation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlite.algorithms.logprobs import OnLogprobs, TokenLogprobs
from rlite.algorithms.reduce import WITHOUT_GRADIENT, Loss, LossSums, PerToken, Weight, call_loss, weigh
from rlite.backends.fsdp2.options import Fsdp2Options
from rlite.backends.models.routing import NO_ROUTING, NONFINITE
from rlite.data.packs import BatchShare, Pack, lazy_pack, pair_rows
from rlite.data.routing import ROUTED
from rlite.errors import ConfigError
from rlite.nn.base import BaseTrainModule
from rlite.observability import stats_tracker
from rlite.registry import located
from rlite.runtime.parallel import fsdp
from rlite.runtime.parallel.upload import upload


class BatchRunner:
    """The batch operations of one rank, as `TrainWorker` declares them. `Fsdp2Worker` holds the module."""

    module: BaseTrainModule
    """the sharded module"""
    _options: Fsdp2Options
    _mesh: fsdp.TrainMesh
    """mesh and position of this rank"""
    _everyone: dist.ProcessGroup
    """all ranks"""
    _device: torch.device
    _weight = 0.0
    """weight of the accumulated gradients, which are gradients of a mean"""
    _is_finite = True
    """true if every loss with accumulated gradients is finite"""

    # -- training ------------------------------------------------------------------------------------------------

    def train_batch(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, Any]:
        """Make one optimizer step on a batch; see `TrainWorker.train_batch`.

        Args:
            share: this data rank's rows and microbatches.
            loss_fn: the mean loss of a pack.
            loss_weight_fn: weight of a pack's mean.

        Returns:
            The results of `forward_backward` and `optimizer_step`.
        """
        self._optimizer("train_batch")
        self._forget()
        means = self.forward_backward(share, loss_fn, loss_weight_fn)
        return {**means, **self.optimizer_step()}

    def forward_backward(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, Any]:
        """Accumulate the gradients of a batch; see `TrainWorker.forward_backward`.

        Args:
            share: this data rank's rows and microbatches.
            loss_fn: the mean loss of a pack.
            loss_weight_fn: weight of a pack's mean.

        Returns:
            Weighted means over all ranks, by name, and `weight`; for each `PerToken` the values of this rank's tokens.

        Raises:
            ConfigError: the loss of a pack with a weight has no gradient.
        """
        if not self._has_gradients():
            self._weight, self._is_finite = 0.0, True
        elif self._weight == 0:
            self._forget()  # gradients that a method of the user's left
        packs, weights, added = self._packs(share, loss_weight_fn)
        if added == 0:
            return {"loss": 0.0, "weight": 0.0}
        before, total, sums = self._weight, self._weight + added, LossSums()
        routing = self.module.routing or NO_ROUTING
        values: defaultdict[str, list[Tensor]] = defaultdict(list)
        try:
            if before:
                self._scale_gradients(before / total)
            if routing.aux_loss_coef:
                self._expect_load(routing, share, loss_fn, packs)
            for rows, weight in zip(share.microbatches, weights, strict=True):
                data = packs.pop(0)
                fsdp.set_gradient_sync(self.module, is_last=not packs)
                with routing.watching():
                    outputs, loss, means = self._loss(loss_fn, rows, data)
                    if weight == 0:
                        computed = outputs.logprobs if isinstance(outputs, TokenLogprobs) else outputs
                        loss = computed.sum() * 0.0  # the mean of nothing may be NaN, and so would be its gradient
                    elif not loss.requires_grad:
                        raise ConfigError(f"loss_fn {located(loss_fn)} {WITHOUT_GRADIENT}")
                    # FSDP averages gradients over ranks; the weights already divide by the whole batch
                    loss = loss * (weight / total * self._mesh.num_averaged)
                    routing.with_auxiliary(loss, added / total * self._mesh.num_averaged, bool(rows)).backward()
                    routing.add(bool(rows))
                sums.add(means, weight)
                for name, value in means.items():
                    if isinstance(value, PerToken):  # it stays on its device
                        values[name].append(own_tokens(rows, value.values))
            summed = sums.means(self._sum, self._mesh.dims.num_data_ranks) | routing.report(self._everyone)
        except Exception:  # a loss that raises must not leave its first microbatches to the next step
            fsdp.forget_gradients(self.module)
            routing.forget()
            raise
        self._weight = total
        self._is_finite &= math.isfinite(summed["loss"]) and not summed.get(NONFINITE)
        return {**summed, "weight": added, **{name: torch.cat(parts).cpu() for name, parts in values.items()}}

    @torch.no_grad()
    def _expect_load(self, routing: Any, share: BatchShare, loss_fn: Loss, packs: list[Pack]) -> None:
        """Let all microbatches choose their experts, so that the auxiliary loss of each knows the load of the batch."""
        with fsdp.resharded(self.module):
            for rows, data in zip(share.microbatches, packs, strict=True):
                with routing.watching():
                    self._outputs(loss_fn, data)
                    routing.add(bool(rows))
        routing.expect(self._everyone)

    def optimizer_step(self) -> dict[str, float]:
        """Clip gradients and make one optimizer step; see `TrainWorker.optimizer_step`.

        Returns:
            `grad_norm`, `lr`, `weight` and `is_skipped`.
        """
        optimizer = self._optimizer("optimizer_step")
        lr = float(optimizer.param_groups[0]["lr"])
        if not self._has_gradients():
            return {"grad_norm": 0.0, "lr": lr, "weight": 0.0, "is_skipped": 1.0}
        norm = fsdp.clip_gradients(self.module.parameters(), self._options.max_grad_norm, self._mesh, self._everyone)
        is_skipped = not (math.isfinite(norm) and self._is_finite)
        if not is_skipped:
            optimizer.step()
        weight = self._weight
        routing = self.module.routing or NO_ROUTING
        routing.finish_step(is_skipped)
        self._forget()  # else gradients take memory, and are offloaded and saved
        return {"grad_norm": norm, "lr": lr, "weight": weight, "is_skipped": float(is_skipped)}

    def _optimizer(self, what: str) -> torch.optim.Optimizer:
        if self.module.optimizer is None:
            raise ConfigError(f"{what} needs self.optimizer: set it in on_weights_materialized")
        return self.module.optimizer

    def _has_gradients(self) -> bool:
        """Return whether any gradient is accumulated. A method of the user's module may have made or dropped it."""
        optimizer = self.module.optimizer
        groups = [{"params": self.module.parameters()}] if optimizer is None else optimizer.param_groups
        return any(parameter.grad is not None for group in groups for parameter in group["params"])

    def _forget(self) -> None:
        (self.module.optimizer or self.module).zero_grad(set_to_none=True)
        self._weight, self._is_finite = 0.0, True
        (self.module.routing or NO_ROUTING).forget()

    def _scale_gradients(self, factor: float) -> None:
        held = [fsdp.local_tensor(p.grad) for p in self.module.parameters() if p.grad is not None]
        torch._foreach_mul_(held, factor)

    # -- without gradients ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval_batch(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, float]:
        """Evaluate a batch without gradients; see `TrainWorker.eval_batch`.

        Args:
            share: this data rank's rows and microbatches.
            loss_fn: the mean loss of a pack.
            loss_weight_fn: weight of a pack's mean.

        Returns:
            Weighted means over all ranks, by name, and `weight`.
        """
        packs, weights, total = self._packs(share, loss_weight_fn)
        sums = LossSums()
        with fsdp.resharded(self.module), _evaluating(self.module):
            for rows, weight in zip(share.microbatches, weights, strict=True):
                _, _, means = self._loss(loss_fn, rows, packs.pop(0))
                sums.add(means, weight)
        return {**sums.means(self._sum, self._mesh.dims.num_data_ranks), "weight": total}

    @torch.no_grad()
    def forward(self, share: BatchShare, post_hook: Callable[..., Tensor], without_adapters: bool) -> Tensor:
        """Apply `post_hook` to every pack; see `TrainWorker.forward`.

        Args:
            share: this data rank's rows and microbatches.
            post_hook: `post_hook(logits [T, V], data) -> [T, ...]`.
            without_adapters: switch the module's adapters off meanwhile.

        Returns:
            The values [T, ...] of the tokens of the share's own rows, on CPU.
        """
        found: list[Tensor] = []
        base = self.module.without_adapters() if without_adapters else nullcontext()
        with fsdp.resharded(self.module), _evaluating(self.module), base:
            for number, rows in enumerate(share.microbatches):
                data = self._pack(share, number)
                outputs = self._outputs(post_hook, data)
                with _counting(rows):
                    values = post_hook(outputs, data)
                found.append(own_tokens(rows, values).cpu())
        return torch.cat(found)  # a copy: a slice would be sent with all that it is a slice of

    def _packs(self, share: BatchShare, loss_weight_fn: Weight) -> tuple[list[Pack], list[float], float]:
        """Return this rank's packs, their weights, and the weight of the whole batch."""
        packs = [self._pack(share, number) for number in range(len(share.microbatches))]
        given: Any = zip(share.microbatches, packs, strict=True)
        weights = [weigh(loss_weight_fn, data) if rows else 0.0 for rows, data in given]
        return packs, weights, self._sum([sum(weights)])[0]

    def _pack(self, share: BatchShare, number: int) -> Pack:
        rows = share.microbatches[number] or pair_rows(share.batch)
        return lazy_pack(share.batch, rows, self._device, share.sharing[number])

    def _outputs(self, function: Callable[..., Any], data: Pack) -> Tensor | TokenLogprobs:
        """Return the input of a loss or post_hook: logits, or log-probabilities if they suffice."""
        if isinstance(function, OnLogprobs):
            if function.records_routing:
                data[ROUTED] = None
            positions = function.positions(data.on_host())  # to count the device's would wait for it
            return self.module.compute_logprobs(data, function.temperature, positions)
        return self.module.compute_logits(data)

    def _loss(self, loss_fn: Loss, rows: list[int], data: Pack) -> tuple[Any, Tensor, dict[str, Any]]:
        """Return the outputs of a pack, its loss, and the loss with the means that loss_fn reports."""
        outputs = self._outputs(loss_fn, data)
        with _counting(rows):
            loss, report = call_loss(loss_fn, outputs, data)
        return outputs, loss, {**report, "loss": loss}  # which decides whether the step is made

    def _sum(self, values: list[float]) -> list[float]:
        """Return the sums over ranks with different data, in float64."""
        summed = upload(values, self._device, torch.float64)
        dist.all_reduce(summed, group=self._everyone)
        return (summed / self._mesh.dims.num_peers).tolist()  # every sum is there once for each peer


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Put the module into evaluation mode in the block. Afterwards every submodule returns to its earlier mode."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


def _counting(rows: list[int]) -> AbstractContextManager[Any]:
    """Return a context that ignores reports to stats_tracker if a microbatch has only padding rows."""
    return nullcontext() if rows else stats_tracker.apart()


def own_tokens(rows: list[int], values: Tensor) -> Tensor:
    """Return the values [T, ...] of a pack, or no values [0, ...] of a microbatch that has only padding rows.

    Args:
        rows: row numbers of the microbatch; an empty microbatch has none.
        values: values of the pack's tokens.
    """
    return values if rows else values[:0]
