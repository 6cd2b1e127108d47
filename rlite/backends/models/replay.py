"""Routing replay: a mixture of experts computes with experts that another pass has chosen for the same tokens.

The pass that sampled a token and the pass that trains on it choose other experts for some tokens, because their scores
differ a little (other kernels, other dtypes, newer weights). A token's log-probability then changes by a step, not a
little, and importance ratios explode (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", arXiv:2510.11370). With replay, the choice is the recorded one, and the weights of the chosen
experts are those of this pass, with their gradients.

No code per architecture: a block chooses experts by the last `topk` before the call of its experts, over as many scores
as there are experts. In a forward pass with replay, a torch function mode around the block replaces its indices, and
gathers the scores at them. `replay_obstacle` checks it with a small model of the class: experts must be called with the
replayed choice, whatever it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from rlite.backends.models.architecture import miniature, once_per_config, sequences
from rlite.backends.models.experts import block_of, experts_of, plain_name, use_implementation
from rlite.data.routing import ROUTED, RoutingShape, RoutingTable
from rlite.errors import ConfigError
from rlite.nn.pretrained import load_config, meta_model, real_tensors, summary
from rlite.runtime.parallel.context_parallel import ContextShare, pad_to_multiple

TOP_K = ("num_experts_per_tok", "moe_topk", "top_k_experts")
"""names in configs of the number of experts that a layer chooses for a token"""
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
"""number of a layer in the name of a module"""


def routing_shape(model: PreTrainedModel) -> RoutingShape | None:
    """Return the form of a model's choices; None without experts, or if the config does not say how many it chooses."""
    experts, config = list(experts_of(model).values()), model.config.get_text_config()
    found = [value for name in TOP_K if isinstance(value := getattr(config, name, None), int)]
    return RoutingShape(len(experts), found[0], experts[0].num_experts) if experts and found else None


def routing_table(path: str) -> RoutingTable:
    """Return the form of the tables in which another engine returns the chosen experts of a checkpoint's model."""
    model = meta_model(load_config(path))
    if (shape := routing_shape(model)) is None:
        raise ConfigError(f"{path}: the model has no experts whose choice could be recorded ({ROUTED})")
    layers = (int(LAYER.findall(name)[0]) for name in experts_of(model))
    return RoutingTable(shape, tuple(layers), model.config.get_text_config().num_hidden_layers)


class Replay:
    """The choices that one rank's model replays, and those that it has made.

    Make it before experts are divided and parameters are sharded.
    """

    def __init__(self, model: nn.Module, shape: RoutingShape) -> None:
        self.shape = shape
        self.tensor_group: dist.ProcessGroup | None = None
        """ranks that hold parts of the tokens between blocks (tensor parallel)"""
        self.chosen: list[Tensor] | None = None
        """choices of the forward pass in `recording`, [t, K] for each layer; None records nothing"""
        self._given: Tensor | None = None
        """choices to replay, [t, layers, K]; -1 is none, and the model chooses itself; None replays nothing"""
        self._counted: Tensor | None = None
        """number of times that each token counts, [t]; None counts nothing"""
        self._has_replayed = False
        self._seen: list[Tensor] = []
        """for each layer, the number of choices that differ from the replayed ones, and of all that were replayed"""
        self._counts: list[Tensor] = []
        """the same for the passes that count"""
        for layer, (name, experts) in enumerate(experts_of(model).items()):
            block = block_of(model, name)
            block.forward = partial(self._forward, layer, block.forward)
            experts.register_forward_pre_hook(partial(self._see, plain_name(name)))

    def _forward(self, layer: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._given is None:
            return forward(*args, **kwargs)
        self._has_replayed = False
        with _ReplayedTopK(partial(self._replaced, self._given[:, layer])):
            return forward(*args, **kwargs)

    def _replaced(self, given: Tensor, scores: Tensor, own: Tensor) -> Tensor | None:
        """Return the indices in place of those of a `topk`; None if it does not choose experts.

        `given`: choices to replay, [t, K].
        """
        top_k, num_experts = self.shape.top_k, self.shape.num_experts
        if own.shape[-1] != top_k or scores.shape[-1] != num_experts or own.numel() != given.numel():
            return None
        self._has_replayed = True
        given = given.view(own.shape)
        is_given = (given >= 0).all(-1, keepdim=True)
        if self._counted is not None and torch.is_grad_enabled():
            differs = (given.sort(-1).values != own.sort(-1).values).any(-1, keepdim=True) & is_given
            counted = self._counted.view(is_given.shape)
            self._seen.append(torch.stack([(differs * counted).sum(), (is_given * counted).sum()]))
        return torch.where(is_given, given, own)

    def _see(self, name: str, experts: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Keep the choice that the experts are called with."""
        if self.chosen is not None:
            self.chosen.append(args[1])
        if self._given is not None and not self._has_replayed:
            problem = f"{name} has experts that no topk has chosen among {self.shape.num_experts}"
            raise ConfigError(f"routing replay: {problem}; use actor.routing_replay=off")

    @contextmanager
    def replaying(self, given: Tensor | None, counted: Tensor | None = None) -> Iterator[None]:
        """Replay choices in the forward passes inside of the block.

        `given`: choices for this rank's tokens, [t, layers, K]; None replays nothing. `counted`: count how often the
        model's own choice differs, each token so many times, [t]; None does not count.
        """
        before = self._given, self._counted
        self._given, self._counted = given, counted
        try:
            yield
        finally:
            self._given, self._counted = before

    def replaying_pack(self, column: Tensor, share: ContextShare) -> Any:
        """Return a context that replays the choices of a pack for this rank's tokens.

        `column`: `routed_experts` of the pack, [T, B].
        """
        given = share.take(self.shape.decode(column) + 1)  # padding is zero
        counted = share.own_counts(given[:, 0, 0])
        if (group := self.tensor_group) is not None:
            given, counted = (
                pad_to_multiple(x, group.size(), 0).chunk(group.size())[group.rank()] for x in (given, counted)
            )
        return self.replaying(given - 1, counted)

    def replaying_alike(self) -> Any:
        """Return a context that replays what is replayed now, for the recomputation of a part of a forward pass."""
        return self.replaying(self._given)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the choices of the forward pass inside of the block in `chosen`, until the next one."""
        self.chosen = []
        try:
            yield
        finally:
            self.chosen = None

    def recorded(self, share: ContextShare, num_own: int) -> Tensor:
        """Return the bytes [T, B] of the choices of a pack, of all ranks; call it inside of `recording`."""
        assert self.chosen is not None
        own = torch.stack(self.chosen, dim=1)
        if (group := self.tensor_group) is not None:
            parts = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(parts, own.contiguous(), group=group)
            own = torch.cat(parts)[:num_own]
        return self.shape.encode(share.gather_results(own))

    def add(self, is_counted: bool) -> None:
        """Count the choices of the last forward pass.

        `is_counted`: False for a microbatch that has only padding rows.
        """
        self._counts += self._seen if is_counted else [torch.zeros_like(each) for each in self._seen]
        self._seen = []

    def take_counts(self) -> Tensor | None:
        """Return the number of choices that differed from the replayed ones, and of all, since the last call.

        Passes without gradients do not count. A choice is that of one layer for one token.
        """
        counts, self._counts = self._counts, []
        return torch.stack(counts).sum(0).double() if counts else None


class _ReplayedTopK(TorchFunctionMode):
    """A mode in which a `topk` returns other indices, and the scores at them.

    `replace`: `replace(scores, indices)` returns the indices in place of these, or None to leave them.
    """

    def __init__(self, replace: Any) -> None:
        super().__init__()
        self._replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return the result of a function, or of a `topk` with other indices."""
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not Tensor.topk:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        indices = self._replace(scores, result.indices)
        return result if indices is None else torch.return_types.topk((scores.gather(-1, indices), indices))


@torch.no_grad()
def replay_obstacle(model: PreTrainedModel, ids: Tensor) -> str | None:
    """Return why the choices of a small model cannot be replayed; None if they can.

    `model`: the model, with weights. It is changed. `ids`: token ids of one sequence, [t].
    """
    shape = routing_shape(model)
    if shape is None:
        return "its config does not say how many experts a layer chooses"
    replay = Replay(model, shape)

    def computed(given: Tensor | None) -> tuple[Tensor, Tensor]:
        with replay.recording(), replay.replaying(given):
            logits = model(input_ids=ids[None], use_cache=False).logits
            return logits, torch.stack(replay.chosen or [], dim=1)

    try:
        logits, own = computed(None)
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(len(ids), shape.num_layers, shape.num_experts, generator=generator)
        given = scores.topk(shape.top_k).indices
        given[::3] = -1
        found, again = computed(given)[1], computed(own)[0]
    except Exception as error:  # of any kind: the class's own code
        return f"a small copy of it fails with {summary(error)}"
    found = torch.where((given < 0).all(-1, keepdim=True), -1, found)
    if not torch.equal(found.sort(-1).values, given.sort(-1).values):
        return "its experts are not chosen by a topk over their scores"
    return None if torch.equal(again, logits) else "its choice depends on more than the scores"


@once_per_config
@real_tensors()
def replay_refusal(cls: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Return why the choices of a model cannot be replayed; None if they can."""
    model = miniature(cls, config)
    if not experts_of(model):
        return "has no experts"
    use_implementation(model, "eager")
    return replay_obstacle(model, sequences()[0])
