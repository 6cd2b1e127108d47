"""The choices of routers while a model trains: load, auxiliary loss, correction biases, and their metrics.

Hooks see what every architecture has: the scores that a router returns first, and the experts that are chosen. A layer
has E experts, of which a token chooses K. Of the N tokens of a batch, on all ranks, without padding:

    load f_e         share of the N K choices that fall on expert e
    probability P_e  mean of the router's scores of expert e, which sum to 1 for each token
    auxiliary loss   mean over layers of E sum_e f_e P_e: 1 if both are even (Fedus et al. 2021, "Switch Transformers",
                     equation 4, over K). It has a gradient through P alone, and f is that of the whole batch, so any
                     split into microbatches and ranks gives the same gradient (Qiu et al. 2025, "Demons in the Detail")
    correction bias  b_e += rate sign(1 / E - f_e) after each optimizer step (Wang et al. 2024, "Auxiliary-Loss-Free
                     Load Balancing"), for routers that have one
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlite.backends.models.experts import block_of, corrections, experts_of, plain_name
from rlite.backends.models.replay import Replay
from rlite.errors import ConfigError
from rlite.runtime.parallel.context_parallel import pad_to_multiple
from rlite.runtime.parallel.fsdp import local_shard

ROUTER = re.compile(r"gate|router")
"""parts of the names of routers, beside the experts"""
DROPPED_STEPS = 20
"""optimizer steps without a token after which an expert counts as dropped"""
MAX_LISTED = 128
"""most experts whose load has a metric for each"""
NONFINITE = "moe/nonfinite_tokens"
"""metric of the tokens whose scores are not finite"""
KINDS = ("softmax", "sigmoid", "given")
"""ways in which the scores that a router returns become probabilities"""


class _Layer:
    """The router and the experts of one layer."""

    def __init__(self, name: str, experts: Any) -> None:
        self.name = name
        self.num_experts: int = experts.num_experts
        self.scores: Tensor | None = None
        """scores of the forward pass that runs, [t, E]"""
        self.kind: str | None = None
        """one of KINDS; known from the first forward pass on"""

    def see_scores(self, router: nn.Module, args: Any, output: Any) -> None:
        """Keep a router's scores until its experts are called.

        `output`: its output; the scores, or a tuple that begins with them.
        """
        scores = output[0] if isinstance(output, tuple) else output
        # one score more is that of skipping the experts (Zaya); the choice is then any expert with weight 0
        if isinstance(scores, Tensor) and scores.shape[-1] in (self.num_experts, self.num_experts + 1):
            self.scores = scores.flatten(0, -2)

    def probabilities(self, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the probabilities of all experts [t, E] for the tokens whose experts were chosen.

        `chosen`: [t, K]. `weights`: [t, K].
        """
        assert self.scores is not None, "the router beside the experts returned no scores"
        if self.kind is None:
            self.kind = score_kind(self.scores.detach(), chosen, weights.detach())[0]
        return _probabilities(self.scores, self.kind)[:, : self.num_experts]


def _probabilities(scores: Tensor, kind: str) -> Tensor:
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if kind == "softmax":
        return scores.softmax(-1)
    positive = scores.sigmoid() if kind == "sigmoid" else scores
    return positive / positive.sum(-1, keepdim=True)


def score_kind(scores: Tensor, chosen: Tensor, weights: Tensor) -> tuple[str, float]:
    """Return how a router's scores become its weights, and the largest difference from the weights that remains.

    Weights are compared after they are scaled to sum to 1 for each token. Tokens that skip experts are left out.

    `scores`: [t, E]. `chosen`: [t, K]. `weights`: [t, K].
    """
    expected = weights.double() / weights.double().sum(-1, keepdim=True)
    skips = (weights == 0).any(-1, keepdim=True)
    errors: dict[str, float] = {}
    for kind in KINDS if bool((scores >= 0).all()) else KINDS[:2]:
        found = _probabilities(scores.double(), kind).gather(-1, chosen)
        error = (found / found.sum(-1, keepdim=True) - expected).abs().masked_fill(skips, 0)
        errors[kind] = float(error.amax().nan_to_num(torch.inf))
    best = min(errors, key=errors.__getitem__)
    return best, errors[best]


class _Seen(NamedTuple):
    """Sums over this rank's tokens in one layer."""

    counts: Tensor
    """choices of each expert, [E]"""
    probabilities: Tensor
    """sums of the probabilities, [E]"""
    num_nonfinite: Tensor
    """tokens whose scores are not finite"""


class Routing:
    """Observer of the routers of one rank's model, and the owner of their balance.

    It sees the forward passes inside of `watching()`. There, `compute_logits` states with `tokens` which tokens count.
    """

    def __init__(self, model: PreTrainedModel, aux_loss_coef: float = 0.0, bias_update_rate: float = 0.0) -> None:
        self.aux_loss_coef, self._rate = aux_loss_coef, bias_update_rate
        self.tensor_group: dist.ProcessGroup | None = None
        """ranks that hold parts of the tokens between blocks (tensor parallel)"""
        self.replay: Replay | None = None
        """counts choices that differ from the replayed ones"""
        self._model = model
        self._layers: list[_Layer] = []
        for name, experts in experts_of(model).items():
            block, layer = block_of(model, name), _Layer(name, experts)
            for child, module in block.named_children():
                if ROUTER.search(child):
                    module.register_forward_hook(layer.see_scores)
            experts.register_forward_pre_hook(partial(self._observe, layer))
            self._layers.append(layer)
        self._is_watching = self._is_recording = False
        self._counted: Tensor | None = None
        """tokens of the batch that each of this rank's tokens stands for, [t] int64; None outside of `watching`"""
        self._seen: dict[str, _Seen] = {}
        """sums of the last forward pass, by layer"""
        self._total: Tensor | None = None
        """sums since the last report, over this rank's tokens: counts, probabilities, tokens not finite, tokens"""
        self._load: Tensor | None = None
        """[layers, E], shares of choices that the auxiliary loss is computed with"""
        self._num_tokens = 0.0
        """tokens of the batch on all ranks, for the auxiliary loss"""
        self._step_counts = self._zeros()
        """choices since the last optimizer step, of all ranks, [layers, E]"""
        self._idle_steps = self._zeros()
        """optimizer steps since an expert's last token, [layers, E]"""

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self._layers), self._layers[0].num_experts, dtype=torch.float64, device="cpu")

    # -- what a forward pass shows -------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the forward passes inside of the block. Their backward passes belong into it, too."""
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching, self._counted, self._seen = False, None, {}

    @contextmanager
    def tokens(self, counted: Tensor) -> Iterator[None]:
        """See the forward pass inside of the block, if it is watched.

        `counted`: [t], how often each of this rank's tokens counts: 0 is padding, and a token that several sequences
        share counts once for each. Bool or int64.
        """
        if not self._is_watching:
            yield
            return
        group, counted = self.tensor_group, counted.long()
        if group is not None:
            counted = pad_to_multiple(counted, group.size(), 0).chunk(group.size())[group.rank()]
        self._counted, self._is_recording, self._seen = counted, True, {}
        try:
            yield
        finally:
            self._is_recording = False

    def _observe(self, layer: _Layer, experts: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        """Sum up what the tokens of a layer have chosen.

        A recomputed forward pass repeats each operation with a gradient, and records nothing.
        """
        counted, has_gradient = self._counted, self.aux_loss_coef > 0 and torch.is_grad_enabled()
        if counted is None or not (self._is_recording or has_gradient):
            return
        _, chosen, weights = args
        with torch.set_grad_enabled(has_gradient):
            probabilities = layer.probabilities(chosen, weights)
            sums = (torch.where(counted[:, None] > 0, probabilities, 0.0) * counted[:, None]).sum(0)
        if self._is_recording:
            counts = torch.zeros(layer.num_experts, dtype=torch.int64, device=chosen.device)
            counts.scatter_add_(0, chosen.flatten(), (counted[:, None] * (weights != 0)).flatten())
            is_finite = probabilities.detach().isfinite().all(-1)
            self._seen[layer.name] = _Seen(counts, sums, (counted * ~is_finite).sum())

    # -- a batch -------------------------------------------------------------------------------------------------

    def add(self, is_counted: bool) -> None:
        """Add the last forward pass to the sums of the batch.

        `is_counted`: False for a microbatch that has only padding rows.
        """
        if self.replay is not None:
            self.replay.add(is_counted)
        if self._counted is None:  # a compute_logits of the user's own
            if self.aux_loss_coef:
                problem = "compute_logits of the module does not say which tokens count"
                raise ConfigError(f"router_aux_loss_coef: {problem}; call the model inside self.routing.tokens(mask)")
            return
        seen = [self._seen[layer.name] for layer in self._layers]
        parts = (
            *(torch.cat([part.detach() for part in column]) for column in list(zip(*seen, strict=True))[:2]),
            torch.stack([each.num_nonfinite for each in seen]).sum()[None],
            self._counted.sum()[None],
        )
        own = torch.cat([part.double() for part in parts]) * float(is_counted)
        self._total = own if self._total is None else self._total + own

    def _take(self, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, float, float]:
        """Return counts and mean probabilities [layers, E], tokens not finite and tokens: of all ranks, on the CPU."""
        assert self._total is not None
        total, self._total = self._total.clone(), None
        dist.all_reduce(total, group=group)
        num_layers, num_experts = self._step_counts.shape
        counts, sums, rest = total.cpu().split([num_layers * num_experts] * 2 + [2])
        num_nonfinite, num_tokens = rest.tolist()
        shape = num_layers, num_experts
        return counts.view(shape), sums.view(shape) / max(num_tokens, 1.0), num_nonfinite, num_tokens

    def expect(self, group: dist.ProcessGroup) -> None:
        """Take the load of the added forward passes for the auxiliary loss of the same batch; a collective."""
        counts, _, _, self._num_tokens = self._take(group)
        self._load = _shares(counts)

    def with_auxiliary(self, loss: Tensor, factor: float, is_counted: bool) -> Tensor:
        """Return a loss to which the auxiliary loss of the last forward pass is added.

        `is_counted`: False for a microbatch that has only padding rows.
        """
        return loss + factor * self._auxiliary_loss() if self.aux_loss_coef and is_counted else loss

    def _auxiliary_loss(self) -> Tensor:
        """Return this microbatch's part of the batch's auxiliary loss: the parts of all ranks sum up to the whole."""
        assert self._load is not None
        sums = torch.stack([self._seen[layer.name].probabilities for layer in self._layers])
        num_layers, num_experts = sums.shape
        even = num_experts * (self._load.to(sums) * sums).sum() / num_layers
        return self.aux_loss_coef * even / max(self._num_tokens, 1.0)

    def report(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Return the metrics of the added forward passes, of all ranks; a collective.

        Returns `moe/...`: `load_max` and `load_min` of all layers, as multiples of an even load; `load/N` of expert N,
        the mean over layers; `auxiliary_loss`, 1 if balanced; `idle_share` of the experts of all layers that got no
        token of this batch; `dropped_share`, none in DROPPED_STEPS optimizer steps; `nonfinite_tokens`; and
        `replay_differs`, the share of replayed choices (of a layer for a token) that the model would not make.
        """
        if self._total is None:
            return {}
        counts, means, num_nonfinite, _ = self._take(group)
        self._step_counts += counts
        load, num_experts = _shares(counts), counts.shape[1]
        relative, idle = num_experts * load, self._step_counts == 0
        metrics: dict[str, Any] = {
            "load_max": relative.max(),
            "load_min": relative.min(),
            "auxiliary_loss": num_experts * (load * means).sum() / len(load),
            "idle_share": (counts == 0).double().mean(),
            "dropped_share": (idle & (self._idle_steps + 1 >= DROPPED_STEPS)).double().mean(),
            "nonfinite_tokens": num_nonfinite,
        }
        if num_experts <= MAX_LISTED:
            metrics |= {f"load/{number:03d}": each for number, each in enumerate(relative.mean(0))}
        if self.replay is not None and (differing := self.replay.take_counts()) is not None:
            dist.all_reduce(differing, group=group)
            metrics["replay_differs"] = differing[0] / differing[1].clamp(min=1.0)
        return {f"moe/{name}": float(value) for name, value in metrics.items()}

    # -- an optimizer step ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish_step(self, is_skipped: bool) -> None:
        """Update the correction biases with the load since the last step, and forget the load."""
        if not is_skipped:
            self._idle_steps = torch.where(self._step_counts > 0, 0.0, self._idle_steps + 1)
            biases = corrections(self._model) if self._rate else {}
            change = self._rate * (1 / self._step_counts.shape[1] - _shares(self._step_counts)).sign()
            for own, layer in zip(change, self._layers, strict=True):
                block = plain_name(layer.name).rpartition(".")[0]
                for name, bias in biases.items():
                    if name.startswith(f"{block}."):
                        shard = local_shard(bias)
                        shard.tensor.add_(own.view(bias.shape)[shard.box].to(shard.tensor))
        self.forget()

    def forget(self) -> None:
        """Forget the load since the last step."""
        self._step_counts, self._total = self._zeros(), None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the metrics and biases to resume from."""
        return {"step_counts": self._step_counts.clone(), "idle_steps": self._idle_steps.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state; an empty one begins anew."""
        self._step_counts = state.get("step_counts", self._zeros()).clone()
        self._idle_steps = state.get("idle_steps", self._zeros()).clone()


class NoRouting:
    """Null object in place of `Routing`, for a model without experts."""

    aux_loss_coef = 0.0

    def watching(self) -> AbstractContextManager[None]:
        """Return a context that sees nothing."""
        return nullcontext()

    def with_auxiliary(self, loss: Tensor, factor: float, is_counted: bool) -> Tensor:
        """Return the loss itself."""
        return loss

    def add(self, is_counted: bool) -> None:
        """Add nothing."""

    def report(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def finish_step(self, is_skipped: bool) -> None:
        """Do nothing."""

    def forget(self) -> None:
        """Forget nothing."""


NO_ROUTING = NoRouting()


def _shares(counts: Tensor) -> Tensor:
    return counts / counts.sum(-1, keepdim=True).clamp(min=1.0)


def check_balance(model: PreTrainedModel, aux_loss_coef: float, bias_update_rate: float) -> None:
    """Check that a model has what the options of balance change."""
    options = {"router_aux_loss_coef": aux_loss_coef, "router_bias_update_rate": bias_update_rate}
    kind = model.config.model_type
    for option, value in options.items():
        if value and not experts_of(model):
            raise ConfigError(f"{option}={value:g}: {kind!r} has no experts to balance; leave it out")
    if bias_update_rate and not corrections(model):
        problem = f"the routers of {kind!r} have no correction bias"
        raise ConfigError(f"router_bias_update_rate={bias_update_rate:g}: {problem}; use router_aux_loss_coef")
