import pytest
import torch
from torch import nn

from rlite.nn.linear import MIN_ROWS, speed_up_linear_layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 40, 24), (MIN_ROWS, 24), (1, 24)])
def test_fast_layers_give_the_values_and_gradients_of_plain_ones(bias, shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 56, bias=bias), nn.SiLU(), nn.Linear(56, 8, bias=bias))
    x = torch.randn(shape, requires_grad=True)
    inputs = [x, *model.parameters()]
    expected = model(x)
    expected_gradients = torch.autograd.grad(expected.square().sum(), inputs)
    speed_up_linear_layers(model)
    actual = model(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for gradient, reference in zip(torch.autograd.grad(actual.square().sum(), inputs), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


def test_other_dtypes_and_subclasses_are_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(24, 24), Doubled(24, 24)).double()
    x = torch.randn(20, 24, dtype=torch.float64)
    expected = model(x)
    speed_up_linear_layers(model)
    assert torch.equal(model(x), expected)


def test_a_frozen_input_or_weight_gets_no_gradient():
    layer = nn.Linear(24, 8)
    layer.weight.requires_grad_(False)
    speed_up_linear_layers(layer)
    x = torch.randn(20, 24, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(20, 24))
