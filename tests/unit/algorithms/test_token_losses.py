from __future__ import annotations

import torch

from rlite.algorithms import value_loss


def test_the_value_clip_keeps_the_larger_error() -> None:
    values = torch.tensor([0.0, 1.0], requires_grad=True)
    token = value_loss(values, torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 0.0]), clip=0.5)
    assert token.loss.tolist() == [1.125, 0.125]
    assert token.metrics["clip_fraction"].tolist() == [1.0, 1.0]
    token.loss.sum().backward()
    assert values.grad.tolist() == [0.0, 0.0]
