"""Advantages of ours and of other libraries on random batches with prompts, holes and ragged lengths."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from rlite.algorithms import gae

Peer = Callable[[str], ModuleType]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_gae_is_verls(peer: Peer, gamma: float, lam: float) -> None:
    verl = peer("verl.trainer.ppo.core_algos")
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 6, 11, generator=generator, dtype=torch.float64)
    mask = (torch.rand(6, 11, generator=generator) < 0.7).double()
    whitened, returns = verl.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    _, ours = gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(ours * mask, returns * mask)
