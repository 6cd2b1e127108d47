from __future__ import annotations

import pytest
import torch

from rlite.algorithms import (
    OF_PROBABILITIES,
    PREFERENCE_LOSSES,
    behaviour_weights,
    desensitised_sums,
    kto_loss,
    kto_reference_point,
    preference_loss,
    register_preference_loss,
)
from rlite.errors import ConfigError, UnknownOptionError

CHOSEN, REJECTED = torch.tensor([-4.0, -9.0, -2.0]), torch.tensor([-5.0, -3.0, -2.5])
REF_CHOSEN, REF_REJECTED = torch.tensor([-5.0, -8.0, -2.0]), torch.tensor([-4.0, -4.0, -3.0])
PAIRS = (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)
NONE = torch.zeros(3)


# APO-down lowers both, and DiscoPOP has a slope of the other sign about 0
@pytest.mark.parametrize("name", sorted(set(PREFERENCE_LOSSES) - OF_PROBABILITIES - {"apo_down", "discopop"}))
def test_a_preference_loss_parts_the_responses_of_a_new_policy(name: str) -> None:
    chosen, rejected = REF_CHOSEN.clone().requires_grad_(), REF_REJECTED.clone().requires_grad_()
    loss = preference_loss(chosen, rejected, REF_CHOSEN, REF_REJECTED, loss=name).loss.sum()
    for_chosen, for_rejected = torch.autograd.grad(loss, (chosen, rejected))
    assert (for_chosen < 0).all()
    assert (for_rejected > 0).all()


def test_a_preference_loss_of_ones_own_is_one_function_of_two_log_ratios() -> None:
    @register_preference_loss("test_squared_margin")
    def squared_margin(chosen, rejected, *, beta, target=1.0):
        return (beta * (chosen - rejected) - target).square()

    try:
        expected = (0.1 * (CHOSEN - REF_CHOSEN - REJECTED + REF_REJECTED) - 2.0).square()
        for loss in ("test_squared_margin", squared_margin):
            found = preference_loss(*PAIRS, loss=loss, options={"target": 2.0})
            torch.testing.assert_close(found.loss, expected)
        assert found.metrics["accuracy"].tolist() == [1.0, 0.0, 0.0]
    finally:
        del PREFERENCE_LOSSES["test_squared_margin"]


def test_a_mixture_is_the_weighted_sum() -> None:
    parts = {name: preference_loss(*PAIRS, loss=name).loss for name in ("sigmoid", "bco")}
    mixed = preference_loss(*PAIRS, loss={"sigmoid": 0.8, "bco": 0.2}).loss
    torch.testing.assert_close(mixed, 0.8 * parts["sigmoid"] + 0.2 * parts["bco"])


def test_simpo_is_the_sigmoid_of_mean_logprobs_with_a_margin() -> None:
    found = preference_loss(CHOSEN, REJECTED, NONE, NONE, loss="simpo", beta=2.0, options={"gamma": 0.5})
    torch.testing.assert_close(found.loss, -torch.nn.functional.logsigmoid(2.0 * (CHOSEN - REJECTED) - 0.5))


def test_orpo_compares_odds() -> None:
    odds = [x.exp() / (1 - x.exp()) for x in (CHOSEN, REJECTED)]
    found = preference_loss(CHOSEN, REJECTED, NONE, NONE, loss="orpo", beta=0.3)
    torch.testing.assert_close(found.loss, -0.3 * (odds[0] / odds[1]).log().sigmoid().log())


@pytest.mark.parametrize("sure", [0.0, -1e-9, -200.0])
def test_orpo_stays_finite_for_responses_that_are_certain_or_impossible(sure: float) -> None:
    chosen, rejected = torch.tensor([sure, -1.0], requires_grad=True), torch.tensor([-1.0, sure], requires_grad=True)
    loss = preference_loss(chosen, rejected, torch.zeros(2), torch.zeros(2), loss="orpo").loss.sum()
    gradients = torch.autograd.grad(loss, (chosen, rejected))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert loss.isfinite()


def test_no_gradient_reaches_the_reference() -> None:
    tensors = [x.clone().requires_grad_() for x in PAIRS]
    preference_loss(*tensors, options={"label_smoothing": 0.1}).loss.sum().backward()
    assert [x.grad is None for x in tensors] == [False, False, True, True]


def test_invalid_losses_and_options_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sigmoid'"):
        PREFERENCE_LOSSES.check("sigmod", {})
    with pytest.raises(UnknownOptionError, match=r"no option 'label_smooth'.*'label_smoothing'"):
        PREFERENCE_LOSSES.check("robust", {"label_smooth": 0.1})
    with pytest.raises(UnknownOptionError, match="hinge has no option 'beta'; it has none"):
        PREFERENCE_LOSSES.check("hinge", {"beta": 0.1})
    with pytest.raises(ConfigError, match="both chosen_lengths and rejected_lengths"):
        preference_loss(*PAIRS, chosen_lengths=torch.ones(3))
    with pytest.raises(ConfigError, match=r"'kl'.*reverse_kl, forward_kl, js"):
        preference_loss(*PAIRS, divergence="kl")
    with pytest.raises(ConfigError, match="under one half"):
        preference_loss(*PAIRS, loss="robust", options={"label_smoothing": 0.5})
    with pytest.raises(ConfigError, match="'clamp' bounds the weight"):
        behaviour_weights(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), upper=0.1, metric="k3")


def test_the_tail_after_the_shorter_response_weighs_less_packed_or_padded() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -4.0, -8.0], [-1.0, -1.0, 0.0, 0.0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    shared = torch.tensor([1, 5])
    expected = torch.tensor([-2.0 + 0.5 * -12.0, -2.0])
    torch.testing.assert_close(desensitised_sums(logprobs, mask, shared, tail_weight=0.5), expected)
    packed = desensitised_sums(
        torch.cat([logprobs[0], logprobs[1, :2], torch.tensor([7.0])]),  # the last token is padding of the pack
        torch.cat([mask[0], mask[1, :2], torch.tensor([1])]),
        shared,
        tail_weight=0.5,
        cu_seqlens=torch.tensor([0, 4, 6]),
    )
    torch.testing.assert_close(packed, expected)


def test_kto_pulls_desirable_up_and_undesirable_down_from_a_reference_point_above_zero() -> None:
    assert kto_reference_point(torch.tensor([-3.0, -4.0]), torch.tensor([-2.0, -2.0])) == 0
    logps = torch.tensor([-2.0, -2.0], requires_grad=True)
    kl = kto_reference_point(torch.tensor([-1.0]), torch.tensor([-2.0]))
    loss, metrics = kto_loss(logps, torch.tensor([-3.0, -3.0]), torch.tensor([1, 0]), kl=kl, undesirable_weight=0.5)
    assert metrics["rewards"].tolist() == pytest.approx([0.1, 0.1])
    torch.testing.assert_close(loss, torch.tensor([0.5, 0.25]))
    loss.sum().backward()
    torch.testing.assert_close(logps.grad, torch.tensor([-0.025, 0.0125]))
