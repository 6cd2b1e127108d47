from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from rlite.algorithms import (
    POLICY_LOSSES,
    SELECTIONS,
    LossInputs,
    TokenLoss,
    aggregate,
    clip_cov,
    decoupled_ppo,
    gmpo,
    gspo,
    is_selective,
    policy_loss,
    ppo_clip,
    register_policy_loss,
    second_moment_mask,
    select_tokens,
)
from rlite.errors import ConfigError, UnknownOptionError

LENGTHS = (3, 1, 5, 4)


def batch(seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A pack with holes in its mask, and a padded copy's row and column of each token."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    names = ("logprobs", "old_logprobs", "behaviour_logprobs")
    tensors = {name: -2 * torch.rand(total, generator=generator, dtype=torch.float64) for name in names}
    tensors["advantages"] = torch.randn(total, generator=generator, dtype=torch.float64)
    tensors["weights"] = torch.rand(total, generator=generator, dtype=torch.float64) + 0.5
    tensors["mask"] = torch.rand(total, generator=generator) < 0.8
    return tensors, torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])


def padded(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(x.split(LENGTHS)), batch_first=True)


def call(name: str, tensors: dict[str, torch.Tensor], cu_seqlens: torch.Tensor | None) -> TokenLoss:
    options = {"share": 0.3, "cov_low": 0.0} if name == "clip_cov" else {}
    return policy_loss(name, LossInputs(**tensors, cu_seqlens=cu_seqlens), options)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_packed_loss_is_the_padded_one_and_ignores_what_the_mask_leaves_out(name: str) -> None:
    tensors, cu_seqlens = batch()
    ours = tensors["logprobs"].requires_grad_()
    packed_loss = aggregate(call(name, tensors, cu_seqlens).loss, tensors["mask"], cu_seqlens=cu_seqlens)
    (packed_grad,) = torch.autograd.grad(packed_loss, ours)
    rows = {key: padded(value.detach()) for key, value in tensors.items()}
    for key in ("old_logprobs", "behaviour_logprobs", "advantages"):
        rows[key] = torch.where(rows["mask"], rows[key], 3.0)
    logprobs = rows["logprobs"].requires_grad_()
    padded_loss = aggregate(call(name, rows, None).loss, rows["mask"])
    (padded_grad,) = torch.autograd.grad(padded_loss, logprobs)
    torch.testing.assert_close(padded_loss, packed_loss)
    torch.testing.assert_close(torch.where(rows["mask"], padded_grad, 0.0), padded(packed_grad))
    assert packed_grad[~tensors["mask"]].abs().max() == 0


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"clip_cov", "kl_cov", "decoupled_ppo"}))
def test_at_the_old_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    tensors, cu_seqlens = batch()
    tensors["old_logprobs"] = tensors["behaviour_logprobs"] = tensors["logprobs"].detach().clone()
    # one advantage for a sequence, of which the losses of sequences are made
    tensors["advantages"] = torch.repeat_interleave(
        torch.tensor([1.0, -2.0, 0.5, -0.5]), torch.tensor(LENGTHS)
    ).double()
    tensors["weights"] = torch.ones_like(tensors["weights"])
    logprobs = tensors["logprobs"].requires_grad_()
    loss = aggregate(call(name, tensors, cu_seqlens).loss, tensors["mask"], cu_seqlens=cu_seqlens)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = -tensors["advantages"] * tensors["mask"] / tensors["mask"].sum()
    torch.testing.assert_close(gradient, expected)


def test_a_loss_of_ones_own_is_one_function() -> None:
    tensors, cu_seqlens = batch()
    inputs = LossInputs(**tensors, cu_seqlens=cu_seqlens)

    @register_policy_loss("test_squared")
    def squared(inputs: LossInputs, *, strength: float = 1.0) -> TokenLoss:
        penalty = (inputs.logprobs - inputs.old_logprobs).square()
        return TokenLoss(strength * penalty - inputs.advantages * inputs.logprobs, {})

    try:
        expected = 0.5 * (inputs.logprobs - inputs.old_logprobs).square() - inputs.advantages * inputs.logprobs
        for loss in ("test_squared", squared):
            token = policy_loss(loss, inputs, {"strength": 0.5})
            torch.testing.assert_close(token.loss, expected * tensors["weights"])
        with pytest.raises(ConfigError, match="is taken"):
            register_policy_loss("test_squared", select=squared)(ppo_clip)
        assert not is_selective("test_squared")
    finally:
        del POLICY_LOSSES["test_squared"]


def test_a_loss_of_ones_own_may_choose_tokens_of_the_whole_batch() -> None:
    tensors, cu_seqlens = batch()

    def above(inputs: LossInputs, *, bound: float = 0.0) -> torch.Tensor:
        return inputs.advantages > bound * inputs.advantages.max()

    @register_policy_loss("test_above", select=above)
    def loss(inputs: LossInputs, *, bound: float = 0.0) -> TokenLoss:
        return TokenLoss(inputs.logprobs * inputs.selected, {})

    try:
        assert is_selective("test_above")
        whole = LossInputs(**tensors, cu_seqlens=cu_seqlens)
        selected = select_tokens("test_above", whole, {"bound": 0.5})
        assert torch.equal(selected, whole.advantages > 0.5 * whole.advantages.max())
        token = policy_loss("test_above", replace(whole, selected=selected, weights=None), {"bound": 0.5})
        assert torch.equal(token.loss, tensors["logprobs"] * selected)
    finally:
        del POLICY_LOSSES["test_above"], SELECTIONS["test_above"]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_called_directly_or_by_name_a_loss_contains_the_weights_once(name: str) -> None:
    tensors, cu_seqlens = batch()
    inputs = LossInputs(**tensors, cu_seqlens=cu_seqlens)
    direct = POLICY_LOSSES[name](inputs)
    assert torch.equal(direct.loss, policy_loss(name, inputs).loss)
    if name not in ("decoupled_ppo", "gmpo", "vespo"):  # the weights are a factor
        plain = policy_loss(name, replace(inputs, weights=None)).loss
        torch.testing.assert_close(direct.loss, plain * tensors["weights"])


def test_a_loss_with_other_arguments_is_refused_before_training() -> None:
    def three(logprobs, old_logprobs, advantages): ...

    def needy(inputs, *, strength): ...

    with pytest.raises(ConfigError, match=r"three cannot be called with \(inputs\): missing .*'old_logprobs'"):
        POLICY_LOSSES.check(three, {})
    with pytest.raises(ConfigError, match=r"needy cannot be called with \(inputs\): missing .*'strength'"):
        POLICY_LOSSES.check(needy, {})
    POLICY_LOSSES.check(needy, {"strength": 2})


def test_an_unknown_loss_or_option_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gspo'"):
        POLICY_LOSSES.check("gpso", {})
    with pytest.raises(UnknownOptionError, match=r"ppo_clip has no option 'clip_hihg'.*'clip_high'"):
        POLICY_LOSSES.check("ppo_clip", {"clip_hihg": 0.3})
    with pytest.raises(UnknownOptionError, match=r"gspo has no option 'inputs'"):
        POLICY_LOSSES.check(gspo, {"inputs": None})


@pytest.mark.parametrize(
    ("name", "option", "value", "expected"),
    [
        ("gspo", "clip_low", "abc", "a number"),
        ("gspo", "clip_low", True, "a number"),
        ("ppo_clip", "dual_clip", "3", "a number or null"),
        ("dppo", "divergence", "tvv", "one of tv, kl"),
        ("clip_cov", "seed", 0.5, "a whole number"),
        ("decoupled_ppo", "token_weights", 1, "true or false"),
    ],
)
def test_an_option_of_the_wrong_kind_is_named_before_anything_is_computed(
    name: str, option: str, value: object, expected: str
) -> None:
    with pytest.raises(ConfigError, match=f"policy loss {name}: {option}={value!r}; expected {expected}$"):
        POLICY_LOSSES.check(name, {option: value})


@pytest.mark.parametrize(
    ("name", "options"),
    [("gspo", {"clip_low": 1, "dual_clip": None}), ("dppo", {"divergence": "kl"}), ("ppo_clip", {"dual_clip": 3})],
)
def test_options_of_the_right_kind_are_taken(name: str, options: dict[str, object]) -> None:
    assert POLICY_LOSSES.check(name, options) is POLICY_LOSSES[name]


@dataclass
class Halved:
    """A loss that is an object: not hashable, and its fields are no options."""

    strength: str = "half"

    def __call__(self, ratio: torch.Tensor, *, strength: float = 0.5, width: "of the band" = 1) -> None: ...


def test_a_loss_of_ones_own_may_be_an_object_and_annotated_as_one_likes() -> None:
    POLICY_LOSSES.check(Halved(), {"strength": 0.25, "width": 3})
    POLICY_LOSSES.check(partial(Halved(), width=2), {"strength": 0.25})


def test_a_loss_that_lacks_what_it_needs_says_so() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ConfigError, match="decoupled_ppo needs behaviour_logprobs"):
        policy_loss("decoupled_ppo", LossInputs(x, x, x, mask=torch.ones(1, 2)))
    with pytest.raises(ConfigError, match="m2po needs behaviour_logprobs"):
        select_tokens("m2po", LossInputs(x, x, x, mask=torch.ones(1, 2)))


def test_every_registered_loss_travels_to_a_worker() -> None:
    for function in POLICY_LOSSES.values():
        assert pickle.loads(pickle.dumps(function)) is function


def test_a_token_that_is_no_candidate_changes_no_other_draw() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, advantages = torch.randn(2, 1000, generator=generator, dtype=torch.float64)
    mask, options = torch.ones(1000), {"share": 0.01, "cov_low": 0.5}
    drawn = select_tokens("clip_cov", LossInputs(logprobs, logprobs, advantages, mask), options)
    assert drawn.sum() == 10
    gone = drawn.nonzero()[3]
    ratio = torch.zeros(1000).index_fill(0, gone, 5.0) * advantages.sign()  # that one is clipped
    others = select_tokens("clip_cov", LossInputs(logprobs, logprobs - ratio, advantages, mask), options)
    assert not others[gone]
    assert (others & drawn).sum() == 9


def test_clip_cov_draws_alike_on_every_rank_and_not_more_than_its_share() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, advantages = torch.randn(2, 1000, generator=generator)
    inputs = LossInputs(logprobs, logprobs, advantages, torch.ones(1000))
    draws = [clip_cov(inputs, share=0.01, cov_low=0.0, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (draw.metrics["cov_clip_fraction"] for draw in draws)
    assert first.sum() == 10
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_second_moment_mask_drops_the_fewest_and_largest() -> None:
    log_ratio = torch.tensor([0.1, 3.0, 0.2, -2.0, 9.0])
    mask = torch.tensor([1, 1, 1, 1, 0])
    assert second_moment_mask(log_ratio, mask, threshold=4.0).tolist() == [True, True, True, True, False]
    assert second_moment_mask(log_ratio, mask, threshold=2.0).tolist() == [True, False, True, True, False]
    assert second_moment_mask(log_ratio, mask, threshold=0.1).tolist() == [True, False, True, False, False]
    assert second_moment_mask(log_ratio, mask, threshold=0.0).tolist() == [True, False, False, False, False]


def test_the_ratio_of_a_sequence_is_one_for_all_its_tokens() -> None:
    tensors, cu_seqlens = batch()
    del tensors["weights"]
    inputs = LossInputs(**tensors | {"advantages": tensors["advantages"].abs()}, cu_seqlens=cu_seqlens)
    ratio = gspo(inputs).metrics["ratio"]
    for row, mask in zip(ratio.split(LENGTHS), tensors["mask"].split(LENGTHS), strict=True):
        assert (row[mask] == row[mask][:1]).all()
    loss = gmpo(inputs, clip_low=0.0, clip_high=0.0).loss
    # clipped to the old policy from above alone: a product of ratios of at most 1
    assert (loss.abs() <= inputs.advantages.max()).all()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_wild_ratio_leaves_finite_losses_and_gradients(name: str) -> None:
    logprobs = torch.tensor([[0.0, -500.0, -1e-9]], requires_grad=True)
    other = torch.tensor([[-500.0, 0.0, -30.0]])
    mask = torch.ones(1, 3)
    for sign in (1.0, -1.0):
        inputs = LossInputs(logprobs, other, torch.full((1, 3), sign), mask, behaviour_logprobs=other, weights=mask)
        token = policy_loss(name, inputs)
        (gradient,) = torch.autograd.grad(token.loss.sum(), logprobs)
        assert token.loss.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "has_gradient"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),
        (0.5, 1.0, True),
        (0.79, -1.0, False),
        (0.81, -1.0, True),
        (2.0, -1.0, True),
        (3.1, -1.0, False),
    ],
)
def test_the_clip_range_is_one_minus_low_to_one_plus_high(ratio: float, advantage: float, has_gradient: bool) -> None:
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    inputs = LossInputs(logprobs, torch.zeros(1), torch.tensor([advantage]), mask=torch.ones(1))
    token = ppo_clip(inputs, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    token.loss.sum().backward()
    assert (logprobs.grad.abs().item() > 0) == has_gradient
    is_clipped = token.metrics["clip_fraction"] + token.metrics["dual_clip_fraction"]
    assert bool(is_clipped.item()) != has_gradient


def test_at_the_old_policy_the_gradient_is_the_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.5, -2.0, 0.0], requires_grad=True)
    ppo_clip(LossInputs(logprobs, logprobs, advantages, mask=torch.ones(3))).loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages.detach())
    assert advantages.grad is None


def test_decoupled_ppo_clips_about_the_proximal_policy_and_weighs_by_the_behaviour_policy() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    proximal = torch.tensor([-1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.5, -3.0], requires_grad=True)
    inputs = LossInputs(logprobs, proximal, torch.ones(2), mask=torch.ones(2), behaviour_logprobs=behaviour)
    token = decoupled_ppo(inputs, upper=5.0)
    token.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -torch.tensor([math.exp(0.5), 5.0]))
    assert proximal.grad is None
    assert behaviour.grad is None
