"""Muon on sharded matrices, and several optimizers that one module uses as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from rlite.runtime.parallel.fsdp import dtensor_like, full_tensor, local_shard, local_tensor


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` whose parameters may be DTensors of any sharding.

    Momentum is sharded as the parameters are. The update of one matrix at a time is gathered in bfloat16, the dtype in
    which torch orthogonalises it, so equal gradients give the bits of `torch.optim.Muon` on one device. Each rank then
    orthogonalises the whole matrix and keeps its part: torch's own operations on DTensors would communicate in each of
    the iteration's products, and sum in another order.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; a collective of the ranks that share the parameters.

        Args:
            closure: computes the loss again; optional.

        Returns:
            The loss of `closure`.
        """
        loss = _recomputed(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_matrix(parameter, parameter.grad, group)
        return loss

    def _step_matrix(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        gradient, buffer = local_tensor(gradient), local_tensor(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        whole = full_tensor(dtensor_like(parameter, update.bfloat16()))
        orthogonal = _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        shard = local_shard(parameter)
        shard.tensor.mul_(1 - group["lr"] * group["weight_decay"])
        lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        shard.tensor.add_(orthogonal[shard.box], alpha=-lr)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one: their parameter groups, in order, and their state.

    Schedulers, checkpoints and offloading see one ordinary optimizer. `load_state_dict` replaces its groups and its
    state, so each step hands the current ones to the optimizers.

    Args:
        optimizers: optimizers that have made no step yet.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._optimizers = [(optimizer, len(optimizer.param_groups)) for optimizer in optimizers]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of each optimizer.

        Args:
            closure: computes the loss again; optional.

        Returns:
            The loss of `closure`.
        """
        loss = _recomputed(closure)
        groups = iter(self.param_groups)
        for optimizer, num_groups in self._optimizers:
            optimizer.param_groups = [next(groups) for _ in range(num_groups)]
            optimizer.state = self.state
            optimizer.step()
        return loss


def _recomputed(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
