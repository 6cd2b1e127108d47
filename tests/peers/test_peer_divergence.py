"""Divergences of distillation against TRL's, on random cases."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from rlite.algorithms.divergence import Divergence
from rlite.backends.models.head_divergence import Head, linear_divergence

Peer = Callable[[str], ModuleType]


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_divergence_is_trls_generalised_jsd(peer: Peer, beta: float, seed: int) -> None:
    theirs = peer("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    generator = torch.Generator().manual_seed(seed)
    rows, width, vocab, temperature = 9, 6, 41, (0.5, 1.0, 1.7, 3.0)[seed]
    shapes = [(rows, width), (vocab, width), (rows, width), (vocab, width)]
    tensors = [3**seed**0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    hidden, weight = (x.requires_grad_() for x in tensors[:2])
    teacher = Head(*tensors[2:])
    ours = linear_divergence(hidden, weight, teacher, Divergence(beta), temperature, block_size=7).sum()
    logits = (hidden @ weight.T)[None], (teacher.hidden @ teacher.weight.T)[None]
    expected = theirs(*logits, beta=beta, temperature=temperature, reduction="sum")
    torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)
    for pair in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (ours, expected)), strict=True):
        torch.testing.assert_close(*pair, atol=1e-9, rtol=1e-9)
