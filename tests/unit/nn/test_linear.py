"""oneDNN's linear layers are torch's, forward and backward, wherever they take over and wherever they do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rlite.backends.models.linear import MIN_ROWS, speed_up_linear_layers


@pytest.mark.parametrize("shape", [(MIN_ROWS - 1,), (40,), (3, 17), (1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_a_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 10, bias=bias)
    speed_up_linear_layers(layer)
    x, seed = torch.randn(*shape, 24, requires_grad=True), torch.randn(*shape, 10)
    expected = F.linear(x, layer.weight, layer.bias)
    inputs = [x, *layer.parameters()]
    for ours, plain in zip(
        torch.autograd.grad(layer(x), inputs, seed), torch.autograd.grad(expected, inputs, seed), strict=True
    ):
        torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(layer(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)


def test_other_dtypes_and_autocast_are_left_to_torch() -> None:
    layer = nn.Linear(24, 10)
    speed_up_linear_layers(layer)
    x = torch.randn(40, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    layer.double()
    torch.testing.assert_close(layer(x.double()), F.linear(x.double(), layer.weight, layer.bias))
