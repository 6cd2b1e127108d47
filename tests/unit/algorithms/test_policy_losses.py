from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from rlite.algorithms import (
    POLICY_LOSSES,
    TokenLoss,
    aggregate,
    check_policy_loss,
    clip_cov,
    gmpo,
    gspo,
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
    tensors = dict(tensors)
    positional = [tensors.pop(key) for key in ("logprobs", "old_logprobs", "advantages")]
    return policy_loss(name, *positional, cu_seqlens=cu_seqlens, options=options, **tensors)


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

    @register_policy_loss("test_squared")
    def squared(logprobs, old_logprobs, advantages, *, strength=1.0):
        return TokenLoss(strength * (logprobs - old_logprobs).square() - advantages * logprobs, {})

    try:
        logprobs, old, advantages = (tensors.pop(key) for key in ("logprobs", "old_logprobs", "advantages"))
        expected = (0.5 * (logprobs - old).square() - advantages * logprobs) * tensors["weights"]
        for loss in ("test_squared", squared):
            token = policy_loss(
                loss, logprobs, old, advantages, cu_seqlens=cu_seqlens, options={"strength": 0.5}, **tensors
            )
            torch.testing.assert_close(token.loss, expected)
        with pytest.raises(ConfigError, match="is taken"):
            register_policy_loss("test_squared")(ppo_clip)
    finally:
        del POLICY_LOSSES["test_squared"]


def test_an_unknown_loss_or_option_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gspo'"):
        check_policy_loss("gpso", {})
    with pytest.raises(UnknownOptionError, match=r"ppo_clip has no option 'clip_hihg'.*'clip_high'"):
        check_policy_loss("ppo_clip", {"clip_hihg": 0.3})
    with pytest.raises(UnknownOptionError, match="'mask'"):
        check_policy_loss(gspo, {"mask": None})


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
        check_policy_loss(name, {option: value})


@pytest.mark.parametrize(
    ("name", "options"),
    [("gspo", {"clip_low": 1, "dual_clip": None}), ("dppo", {"divergence": "kl"}), ("ppo_clip", {"dual_clip": 3})],
)
def test_options_of_the_right_kind_are_taken(name: str, options: dict[str, object]) -> None:
    assert check_policy_loss(name, options) is POLICY_LOSSES[name]


@dataclass
class Halved:
    """A loss that is an object: not hashable, and its fields are no options."""

    strength: str = "half"

    def __call__(self, ratio: torch.Tensor, *, strength: float = 0.5, width: "of the band" = 1) -> None: ...


def test_a_loss_of_ones_own_may_be_an_object_and_annotated_as_one_likes() -> None:
    check_policy_loss(Halved(), {"strength": 0.25, "width": 3})
    check_policy_loss(partial(Halved(), width=2), {"strength": 0.25})


def test_a_loss_that_lacks_what_it_needs_says_so() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ConfigError, match="decoupled_ppo needs behaviour_logprobs"):
        policy_loss("decoupled_ppo", x, x, x, mask=torch.ones(1, 2))


def test_every_registered_loss_travels_to_a_worker() -> None:
    for function in POLICY_LOSSES.values():
        assert pickle.loads(pickle.dumps(function)) is function


def test_a_token_that_is_no_candidate_changes_no_other_draw() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, advantages = torch.randn(2, 1000, generator=generator, dtype=torch.float64)
    mask, options = torch.ones(1000), {"share": 0.01, "cov_low": 0.5}
    drawn = select_tokens("clip_cov", logprobs, logprobs, advantages, mask=mask, options=options)
    assert drawn.sum() == 10
    gone = drawn.nonzero()[3]
    ratio = torch.zeros(1000).index_fill(0, gone, 5.0) * advantages.sign()  # that one is clipped
    others = select_tokens("clip_cov", logprobs, logprobs - ratio, advantages, mask=mask, options=options)
    assert not others[gone]
    assert (others & drawn).sum() == 9


def test_clip_cov_draws_alike_on_every_rank_and_not_more_than_its_share() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, advantages = torch.randn(2, 1000, generator=generator)
    draws = [
        clip_cov(logprobs, logprobs, advantages, mask=torch.ones(1000), share=0.01, cov_low=0.0, seed=seed)
        for seed in (0, 0, 1)
    ]
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
    arguments = (tensors["logprobs"], tensors["old_logprobs"], tensors["advantages"].abs())
    ratio = gspo(*arguments, mask=tensors["mask"], cu_seqlens=cu_seqlens).metrics["ratio"]
    for row, mask in zip(ratio.split(LENGTHS), tensors["mask"].split(LENGTHS), strict=True):
        assert (row[mask] == row[mask][:1]).all()
    loss = gmpo(*arguments, mask=tensors["mask"], cu_seqlens=cu_seqlens, clip_low=0.0, clip_high=0.0).loss
    # clipped to the old policy from above alone: a product of ratios of at most 1
    assert (loss.abs() <= arguments[2].max()).all()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_wild_ratio_leaves_finite_losses_and_gradients(name: str) -> None:
    logprobs = torch.tensor([[0.0, -500.0, -1e-9]], requires_grad=True)
    other = torch.tensor([[-500.0, 0.0, -30.0]])
    mask = torch.ones(1, 3)
    for sign in (1.0, -1.0):
        token = policy_loss(
            name, logprobs, other, torch.full((1, 3), sign), mask=mask, weights=mask, behaviour_logprobs=other
        )
        (gradient,) = torch.autograd.grad(token.loss.sum(), logprobs)
        assert token.loss.isfinite().all()
        assert gradient.isfinite().all()
