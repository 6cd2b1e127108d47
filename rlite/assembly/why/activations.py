"""Activations of a forward pass, and the first module in which two passes differ beyond rounding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlite.backends.embedded.model import ROTATED, See, show
from rlite.trainer.model.modules import PolicyModule, policy_module
from rlite.trainer.model.options import ModelOptions

LEAST, SPREAD = 1e-3, 4.0
"""relative difference of activations that is rounding; and factor of what the dtype alone does to them"""
Activations = dict[str, list[Tensor]]
"""activations [tokens, ...] by the name of the module, in the order of the computation"""


class Difference(NamedTuple):
    """The first module whose activations differ."""

    cause: str
    layer: int | None
    module: str
    size: float
    """largest difference, relative to the largest value"""


def keep(found: Activations, name: str, *values: Tensor) -> None:
    """Keep a copy of activations; later tokens of a module follow its earlier ones."""
    flat = [value.detach().reshape(-1, value.shape[-1]).double() for value in values]
    found[name] = [torch.cat(pair) for pair in zip(found[name], flat, strict=True)] if name in found else flat


@contextmanager
def watching(module: nn.Module, see: See | None) -> Iterator[None]:
    """Call `see(name, *values)` with the outputs of all modules inside the block; None watches nothing."""
    hooks = [each.register_forward_hook(partial(show, see, name)) for name, each in module.named_modules() if see]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def watched_module(options: ModelOptions, path: str) -> PolicyModule:
    """Return a policy module of a checkpoint with a method `activations(data)` of a pack; `logits` are among them."""

    def activations(self: Any, data: Mapping[str, Any]) -> Activations:
        found: Activations = {}
        with torch.no_grad(), watching(self, partial(keep, found)):
            keep(found, "logits", self.compute_logits(data))
        return found

    module = policy_module(path, options.optimizer_options(1), options.lora)
    module.__class__ = type(type(module).__name__, (type(module),), {"activations": activations})
    return module


def first_difference(found: Activations, expected: Activations, coarse: Activations) -> Difference | None:
    """Return the first module in which activations differ beyond rounding; None if none does.

    `found`: the activations; modules that it lacks are not compared.
    """
    for name, own in expected.items():
        if "experts." in name:  # each pass groups the tokens of an expert in its own way
            continue
        pairs = [*zip(found.get(name, ()), own, coarse[name], strict=False)]
        errors = [error(a, b) if error(a, b) > max(LEAST, SPREAD * error(c, b)) else 0.0 for a, b, c in pairs]
        if not any(errors):
            continue
        match = re.search(r"layers\.(\d+)\.", name)
        is_turned = name.endswith(ROTATED) and all(error(*map(radii, pair[:2])) < LEAST for pair in pairs[:2])
        if "rotary_emb" in name or (is_turned and not errors[2]):
            cause = "position"
        elif "self_attn" in name:
            cause = "attention"
        else:
            cause = "routing" if re.search(r"mlp\.(gate|router|experts)|block_sparse_moe", name) else "computation"
        return Difference(cause, None if match is None else int(match[1]), name, max(errors))
    return None


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of the last tokens that both have, relative to the largest value."""
    rows = min(len(found), len(expected))
    if found[-rows:].shape != expected[-rows:].shape:
        return 0.0  # another form of the same values, such as a merged product
    return float((found[-rows:] - expected[-rows:]).abs().max() / expected.abs().max().clamp(min=1e-6))


def radii(values: Tensor) -> Tensor:
    """Return the lengths of the pairs [tokens, width / 2] that a rotation turns."""
    return torch.stack(values.chunk(2, dim=-1)).norm(dim=0)
