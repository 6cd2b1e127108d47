"""A NaN or infinity outside the mask changes neither a loss nor a gradient, whichever tensor holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

import pytest
import torch
from torch import Tensor

from rlite.algorithms.logprobs import kl_penalty
from rlite.algorithms.off_policy import BinaryDivergence, binary_divergence
from rlite.algorithms.policy_losses.base import POLICY_LOSSES, LossInputs, policy_loss
from rlite.algorithms.policy_losses.selection import is_selective, select_tokens
from rlite.algorithms.reduce import aggregate, masked_mean, masked_variance, sequence_means
from rlite.algorithms.token_losses import value_loss
from rlite.types import KLEstimator

MASK = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1])
CU_SEQLENS = torch.tensor([0, 3, 8])
PER_TOKEN = ("logprobs", "old_logprobs", "advantages", "behaviour_logprobs", "weights")
BAD = (float("nan"), float("inf"), float("-inf"))

Loss = Callable[[Mapping[str, Tensor]], Tensor]


def tensors(names: tuple[str, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(len(MASK), generator=generator, dtype=torch.float64) - 1 for name in names}
    return {name: x.exp() if name == "weights" else -x.exp() for name, x in drawn.items()}


def check(loss: Loss, names: tuple[str, ...], trained: tuple[str, ...]) -> None:
    """Compare the loss and its gradients with those for the same tensors without a bad value."""

    def gradients(bad: str | None, value: float) -> list[Tensor]:
        given = tensors(names)
        if bad is not None:
            given[bad] = torch.where(MASK.bool(), given[bad], value)
        leaves = [given[name].requires_grad_() for name in trained]
        total = loss(given)
        return [total.detach(), *torch.autograd.grad(total, leaves)]

    expected = gradients(None, 0.0)
    for bad in names:
        for value in BAD:
            torch.testing.assert_close(
                gradients(bad, value), expected, msg=lambda text, bad=bad, value=value: f"{bad} of {value}: {text}"
            )


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_policy_losses_ignore_what_is_masked(name: str) -> None:
    def loss(given: Mapping[str, Tensor]) -> Tensor:
        inputs = LossInputs(**given, mask=MASK, cu_seqlens=CU_SEQLENS)
        if is_selective(name):
            inputs = LossInputs(**given, mask=MASK, cu_seqlens=CU_SEQLENS, selected=select_tokens(name, inputs, {}))
        return aggregate(policy_loss(name, inputs).loss, MASK, cu_seqlens=CU_SEQLENS)

    check(loss, PER_TOKEN, ("logprobs",))


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", get_args(KLEstimator))
def test_kl_estimates_ignore_what_is_masked(estimator: KLEstimator, straight_through: bool) -> None:
    def loss(given: Mapping[str, Tensor]) -> Tensor:
        kl = kl_penalty(
            given["policy"], given["ref"], estimator, straight_through=straight_through, weights=given["weights"]
        )
        return masked_mean(kl, MASK)

    check(loss, ("policy", "ref", "weights"), ("policy", "ref"))


@pytest.mark.parametrize("divergence", get_args(BinaryDivergence))
def test_binary_divergences_ignore_what_is_masked(divergence: BinaryDivergence) -> None:
    def loss(given: Mapping[str, Tensor]) -> Tensor:
        return masked_mean(binary_divergence(given["one"], given["other"], divergence), MASK)

    check(loss, ("one", "other"), ("one", "other"))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_losses_ignore_what_is_masked(clip: float | None) -> None:
    def loss(given: Mapping[str, Tensor]) -> Tensor:
        return aggregate(value_loss(**given, clip=clip).loss, MASK, cu_seqlens=CU_SEQLENS)

    check(loss, ("values", "returns", "old_values"), ("values",))


def test_means_and_variances_ignore_what_is_masked() -> None:
    check(lambda given: masked_variance(given["x"], MASK) + masked_mean(given["x"], MASK), ("x",), ("x",))
    check(lambda given: sequence_means(given["x"], MASK, CU_SEQLENS).square().sum(), ("x",), ("x",))


def test_a_nan_that_counts_is_not_hidden() -> None:
    given = tensors(("values", "returns"))
    given["returns"][1] = float("nan")
    assert aggregate(value_loss(**given).loss, MASK, cu_seqlens=CU_SEQLENS).isnan()
    assert masked_mean(kl_penalty(given["values"], given["returns"]), MASK).isnan()
    inputs = LossInputs(given["values"], given["returns"], given["values"], MASK, cu_seqlens=CU_SEQLENS)
    assert aggregate(policy_loss("ppo_clip", inputs).loss, MASK, cu_seqlens=CU_SEQLENS).isnan()
