"""Microbatches of one rank: gradients, optimizer steps and evaluation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlite.algorithms.divergence import OnDivergence, OnHidden
from rlite.algorithms.logprobs import OnLogprobs, TokenLogprobs
from rlite.algorithms.reduce import WITHOUT_GRADIENT, Loss, LossSums, PerToken, Weight, call_loss, weigh
from rlite.backends.fsdp2.learners import Adapter, Learner, WholeModule
from rlite.backends.fsdp2.options import Fsdp2Options
from rlite.backends.models.routing import NO_ROUTING, NONFINITE
from rlite.backends.models.teachers import of_taught
from rlite.data.packs import BatchShare, Pack, lazy_pack, pair_rows
from rlite.data.routing import ROUTED
from rlite.errors import ConfigError, did_you_mean
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
    _whole: WholeModule
    """the module's own parameters as what learns"""
    _adapters: dict[str, Adapter]
    """adapters beside the module's layers, by name"""

    # -- training ------------------------------------------------------------------------------------------------

    def _learner(self, adapter: str | None) -> Learner:
        """Return what learns: the module, or an adapter."""
        if adapter is None:
            return self._whole
        if adapter not in self._adapters:
            raise ConfigError(f"there is no adapter {adapter!r}; {did_you_mean(adapter, self._adapters)}")
        return self._adapters[adapter]

    def train_batch(
        self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight | None, adapter: str | None = None
    ) -> dict[str, Any]:
        """Make one optimizer step on a batch; see `TrainWorker.train_batch`."""
        learner = self._learner(adapter)
        optimizer_of(learner, "train_batch")
        learner.forget()
        means = self.forward_backward(share, loss_fn, loss_weight_fn, adapter)
        return {**means, **self.optimizer_step(adapter)}

    def forward_backward(
        self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight | None, adapter: str | None = None
    ) -> dict[str, Any]:
        """Accumulate the gradients of a batch; see `TrainWorker.forward_backward`."""
        learner, is_sum = self._learner(adapter), loss_weight_fn is None
        learner.begin(is_sum)
        packs, weights, added = self._packs(share, loss_weight_fn)
        if added == 0:
            return {"loss": 0.0, "weight": 0.0}
        after, sums = learner.weight + added, LossSums()
        total = learner.divisor(after)
        routing = self.module.routing or NO_ROUTING
        values: defaultdict[str, list[Tensor]] = defaultdict(list)
        try:
            learner.scale_to(total)
            with learner.active():
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
                        routing.with_auxiliary(loss, added / after * self._mesh.num_averaged, bool(rows)).backward()
                        routing.add(bool(rows))
                    sums.add(means, weight)
                    _keep(values, rows, means)
            summed = sums.means(self._sum, self._mesh.dims.num_data_ranks) | routing.report(self._everyone)
        except Exception:  # a loss that raises must not leave its first microbatches to the next step
            fsdp.forget_gradients(self.module)
            learner.forget()
            raise
        learner.weight = after
        learner.is_finite &= math.isfinite(summed["loss"]) and not summed.get(NONFINITE)
        summed["loss"] *= added if is_sum else 1.0
        return {**summed, "weight": added, **_joined(values)}

    @torch.no_grad()
    def _expect_load(self, routing: Any, share: BatchShare, loss_fn: Loss, packs: list[Pack]) -> None:
        """Let all microbatches choose their experts, so that the auxiliary loss of each knows the load of the batch."""
        with fsdp.resharded(self.module):
            for rows, data in zip(share.microbatches, packs, strict=True):
                with routing.watching():
                    self._outputs(loss_fn, data)
                    routing.add(bool(rows))
        routing.expect(self._everyone)

    def optimizer_step(self, adapter: str | None = None, settings: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Clip gradients and make one optimizer step; see `TrainWorker.optimizer_step`."""
        learner = self._learner(adapter)
        optimizer = optimizer_of(learner, "optimizer_step")
        own = dict(settings or {})
        max_norm = own.pop("max_grad_norm", self._options.max_grad_norm)
        learner.set(own)
        lr = float(optimizer.param_groups[0]["lr"])
        if not learner.has_gradients():
            return {"grad_norm": 0.0, "lr": lr, "weight": 0.0, "is_skipped": 1.0}
        norm = learner.clip(max_norm, self._mesh, self._everyone)
        is_skipped = not (math.isfinite(norm) and learner.is_finite)
        if not is_skipped:
            optimizer.step()
        weight = learner.weight
        if adapter is None:
            (self.module.routing or NO_ROUTING).finish_step(is_skipped)
        learner.forget()  # else gradients take memory, and are offloaded and saved
        return {"grad_norm": norm, "lr": lr, "weight": weight, "is_skipped": float(is_skipped)}

    # -- without gradients ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval_batch(
        self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight | None, adapter: str | None = None
    ) -> dict[str, Any]:
        """Evaluate a batch without gradients; see `TrainWorker.eval_batch`."""
        packs, weights, total = self._packs(share, loss_weight_fn)
        sums = LossSums()
        values: defaultdict[str, list[Tensor]] = defaultdict(list)
        with fsdp.resharded(self.module), _evaluating(self.module), self._learner(adapter).active():
            for rows, weight in zip(share.microbatches, weights, strict=True):
                _, _, means = self._loss(loss_fn, rows, packs.pop(0))
                sums.add(means, weight)
                _keep(values, rows, means)
        found = sums.means(self._sum, self._mesh.dims.num_data_ranks)
        found["loss"] *= total if loss_weight_fn is None else 1.0
        return {**found, "weight": total, **_joined(values)}

    @torch.no_grad()
    def forward(
        self,
        share: BatchShare,
        post_hook: Callable[..., Tensor],
        without_adapters: bool,
        adapter: str | None = None,
    ) -> Tensor:
        """Apply `post_hook` to every pack; see `TrainWorker.forward`."""
        found: list[Tensor] = []
        own = self.module.without_adapters() if without_adapters else self._learner(adapter).active()
        with fsdp.resharded(self.module), _evaluating(self.module), own:
            for number, rows in enumerate(share.microbatches):
                data = self._pack(share, number)
                outputs = self._outputs(post_hook, data)
                with _counting(rows):
                    values = post_hook(outputs, data)
                found.append(own_tokens(rows, values).cpu())
        return torch.cat(found)  # a copy: a slice would be sent with all that it is a slice of

    def _packs(self, share: BatchShare, loss_weight_fn: Weight | None) -> tuple[list[Pack], list[float], float]:
        """Return this rank's packs, their weights, and the weight of the whole batch."""
        packs = [self._pack(share, number) for number in range(len(share.microbatches))]
        given: Any = zip(share.microbatches, packs, strict=True)
        weigh_pack = (lambda data: 1.0) if loss_weight_fn is None else partial(weigh, loss_weight_fn)
        weights = [weigh_pack(data) if rows else 0.0 for rows, data in given]
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
            if isinstance(function, OnDivergence | OnHidden):
                return of_taught(self.module, function, data, positions)
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


def optimizer_of(learner: Learner, what: str) -> torch.optim.Optimizer:
    """Return the optimizer of what learns."""
    if learner.optimizer is None:
        raise ConfigError(f"{what} needs self.optimizer: set it in on_weights_materialized")
    return learner.optimizer


def _keep(values: dict[str, list[Tensor]], rows: list[int], means: Mapping[str, Any]) -> None:
    """Add the values of a pack's tokens, which stay on their device."""
    for name, value in means.items():
        if isinstance(value, PerToken):
            values[name].append(own_tokens(rows, value.values))


def _joined(values: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat(parts).cpu() for name, parts in values.items()}


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

    `rows`: row numbers of the microbatch; an empty microbatch has none.
    """
    return values if rows else values[:0]
