"""What algorithms of the user's return is checked, and what they raise is blamed on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite.algorithms import (
    ADVANTAGES,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    SELECTIONS,
    LossInputs,
    TokenLoss,
    is_of_group_alone,
    outcome_advantages,
    policy_loss,
    preference_loss,
    select_tokens,
)
from rlite.errors import ConfigError, OwnCodeError, RliteError

HERE = r"\(.*test_calls\.py:\d+\)"


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """Forget what a test registers."""
    before = [(table, dict(table)) for table in (ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES)]
    yield
    for table, known in before:
        table.clear()
        table.update(known)


def logprobs() -> Tensor:
    return torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)


def call_policy_loss(function: Callable[..., Any]) -> None:
    POLICY_LOSSES["own"] = function
    policy_loss("own", LossInputs(logprobs(), torch.full((3,), -2.0), torch.ones(3), torch.ones(3)))


def call_preference_loss(function: Callable[..., Any]) -> None:
    PREFERENCE_LOSSES["own"] = function
    preference_loss(logprobs(), logprobs() - 1, torch.zeros(3), torch.zeros(3), loss="own")


def call_advantage(function: Callable[..., Any]) -> None:
    ADVANTAGES["own"] = function
    outcome_advantages("own", torch.tensor([1.0, 1.0, 0.0]), torch.zeros(3, dtype=torch.long))


WRONG_LOSSES = {
    "no TokenLoss": (lambda x: -x.logprobs, r"returned a tensor of shape \[3\]; expected rlite.algorithms.TokenLoss"),
    "None": (lambda x: None, "returned None; expected rlite.algorithms.TokenLoss"),
    "scalar": (lambda x: TokenLoss(-x.logprobs.mean(), {}), r"returned a tensor of shape \[\]; expected .* \[3\]"),
    "number": (lambda x: TokenLoss(1.0, {}), r"returned 1.0; expected a tensor of shape \[3\]"),
    "detached": (lambda x: TokenLoss(-x.logprobs.detach(), {}), "returned a loss without a gradient"),
    "gradient of its own": (
        lambda x: TokenLoss(-x.logprobs.detach().requires_grad_(), {}),
        "returned a loss without a gradient",
    ),
    "array": (lambda x: TokenLoss(x.logprobs.detach().numpy(), {}), r"returned array\(.*; expected a tensor"),
    "tuple of one": (lambda x: (x.logprobs,), "returned .*; expected rlite.algorithms.TokenLoss"),
    "whole numbers": (lambda x: TokenLoss(x.mask.long(), {}), "returned a loss without a gradient"),
    "NaN": (lambda x: TokenLoss(x.logprobs / 0 * 0, {}), r"returned nan for finite inputs \(-1, -2, 1\)"),
    "complex": (lambda x: TokenLoss(x.logprobs * 1j, {}), r"returned a complex tensor of shape \[3\]; expected"),
    "metric's name": (
        lambda x: TokenLoss(-x.logprobs, {1: x.mask}),
        r"returned a tensor of shape \[3\] as the metric 1; expected .* a text as name",
    ),
    "metric": (lambda x: TokenLoss(-x.logprobs, {"own": 1.0}), r"returned 1.0 as the metric 'own'; expected"),
    "metric's shape": (
        lambda x: TokenLoss(-x.logprobs, {"own": x.mask[1:]}),
        r"returned a tensor of shape \[2\] as the metric 'own'",
    ),
}


@pytest.mark.parametrize("kind", WRONG_LOSSES)
def test_a_policy_loss_that_returns_something_else_is_named_with_its_place(kind: str) -> None:
    function, said = WRONG_LOSSES[kind]
    with pytest.raises(ConfigError, match=f"policy loss 'own': <lambda> {HERE} {said}"):
        call_policy_loss(function)


WRONG_PREFERENCES = {
    "scalar": (lambda c, r, *, beta: (r - c).mean(), r"returned a tensor of shape \[\]; expected .* \[3\]"),
    "short": (lambda c, r, *, beta: (r - c)[1:], r"returned a tensor of shape \[2\]; expected .* \[3\]"),
    "number": (lambda c, r, *, beta: 1.0, r"returned 1.0; expected"),
    "detached": (lambda c, r, *, beta: (r - c).detach(), "returned a loss without a gradient"),
    "gradient of its own": (lambda c, r, *, beta: (r - c).detach().requires_grad_(), "returned a loss without a grad"),
    "array": (lambda c, r, *, beta: (r - c).detach().numpy(), r"returned array\(.*; expected a tensor"),
    "whole numbers": (lambda c, r, *, beta: (r - c).long(), "returned a loss without a gradient"),
    "NaN": (lambda c, r, *, beta: (c - 9).log(), r"returned nan for finite inputs \(-1, -2\)"),
}


@pytest.mark.parametrize("kind", WRONG_PREFERENCES)
def test_a_preference_loss_that_returns_something_else_is_named_with_its_place(kind: str) -> None:
    function, said = WRONG_PREFERENCES[kind]
    with pytest.raises(ConfigError, match=f"preference loss 'own': <lambda> {HERE} {said}"):
        call_preference_loss(function)


WRONG_ADVANTAGES = {
    "short": (lambda r, g: r[1:], r"returned a tensor of shape \[2\]; expected a tensor of shape \[3\]"),
    "list": (lambda r, g: r.tolist(), r"returned \[1.0, 1.0, 0.0\]; expected a tensor"),
    "NaN": (lambda r, g: (r - r) / (r - r), r"returned nan for finite inputs \(1\)"),
    "infinite": (lambda r, g: r.log(), r"returned -inf for finite inputs \(0\)"),
}


@pytest.mark.parametrize("kind", WRONG_ADVANTAGES)
def test_an_estimator_that_returns_something_else_is_named_with_its_place(kind: str) -> None:
    function, said = WRONG_ADVANTAGES[kind]
    with pytest.raises(ConfigError, match=f"advantage 'own': <lambda> {HERE} {said}"):
        call_advantage(function)


def test_an_estimator_may_change_its_rewards_in_place_and_carries_no_gradient() -> None:
    rewards, factor = torch.tensor([1.0, 0.0]), torch.ones(2, requires_grad=True)
    found = outcome_advantages(lambda r, g: r.sub_(0.5) * factor, rewards, torch.zeros(2, dtype=torch.long))
    assert rewards.tolist() == [1, 0]
    assert found.tolist() == [0.5, -0.5]
    assert not found.requires_grad


def test_a_preference_loss_may_write_into_its_arguments() -> None:
    pairs = [logprobs(), logprobs() * 2, torch.zeros(3), torch.zeros(3)]
    PREFERENCE_LOSSES["own"] = lambda chosen, rejected, *, beta: chosen.sub_(rejected) * -beta
    both, alone = preference_loss(*pairs, loss={"own": 1.0, "ipo": 1.0}), preference_loss(*pairs, loss="ipo")
    assert torch.allclose(both.loss, alone.loss - 0.1 * torch.tensor([1.0, 2.0, 3.0]))


def test_an_estimator_may_write_into_the_ids_of_its_groups() -> None:
    ids = torch.tensor([3, 4])
    outcome_advantages(lambda r, g: r * g.zero_(), torch.tensor([1.0, 0.0]), ids)
    assert ids.tolist() == [3, 4]


SELECTIONS_OF_USERS: dict[str, tuple[Callable[..., Any], str]] = {
    "None": (lambda x: None, r"returned None; expected a tensor of shape \[3\]"),
    "a list": (lambda x: [True] * 3, r"returned \[True, True, True\]; expected"),
    "short": (lambda x: x.advantages[1:] > 0, r"returned a tensor of shape \[2\]; expected"),
    "an exception": (lambda x: x.rewards > 0, r"raised AttributeError\nTraceback"),
    "an option of the loss that it lacks": (lambda x, *, bound: x.advantages > bound, "cannot be called with"),
}


@pytest.mark.parametrize("case", SELECTIONS_OF_USERS)
def test_a_selection_of_tokens_that_returns_something_else_is_named_with_its_place(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, message = SELECTIONS_OF_USERS[case]
    monkeypatch.setitem(POLICY_LOSSES, "own", lambda x: TokenLoss(-x.logprobs, {}))
    monkeypatch.setitem(SELECTIONS, "own", function)
    with pytest.raises(RliteError, match=rf"(?s)selection of tokens '?own'?.*{message}") as raised:
        select_tokens("own", LossInputs(logprobs(), torch.zeros(3), torch.ones(3), torch.ones(3)))
    assert "test_calls.py:" in str(raised.value)


def test_a_loss_without_tokens_does_not_hide_a_loss_without_a_gradient() -> None:
    POLICY_LOSSES["own"] = lambda x: TokenLoss(-x.logprobs.detach(), {})
    policy_loss("own", LossInputs(logprobs(), torch.zeros(3), torch.ones(3), torch.zeros(3)))
    with pytest.raises(ConfigError, match="returned a loss without a gradient"):
        policy_loss("own", LossInputs(logprobs(), torch.zeros(3), torch.ones(3), torch.ones(3)))


def test_a_loss_that_cannot_be_called_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError, match=f"preference loss own cannot be called with .*<lambda> {HERE}"):
        call_preference_loss(lambda chosen, rejected: rejected - chosen)


def test_an_estimator_that_fails_on_the_examples_is_told_of_the_examples() -> None:
    with pytest.raises(ConfigError, match=rf"{HERE}, called at the start with 20 example rewards, returned .* \[19\]"):
        is_of_group_alone(lambda r, g: r[1:], {}, 4)
    assert not is_of_group_alone(lambda r, g: (r - 0.5).log(), {}, 4)  # which may be finite for the run's rewards


@pytest.mark.parametrize("call", [call_policy_loss, call_preference_loss, call_advantage])
def test_what_the_users_function_raises_begins_with_its_own_frames(call: Callable[..., None]) -> None:
    def broken(inputs: Any, *others: Any, **options: Any) -> Any:
        return inputs.no_such_thing

    with pytest.raises(OwnCodeError) as caught:
        call(broken)
    first, _, frame, line, *_ = str(caught.value).splitlines()
    assert first.endswith("raised AttributeError")
    assert "broken (" in first
    assert frame.endswith("in broken")
    assert line.strip() == "return inputs.no_such_thing"
    assert f"{__file__.rpartition('tests')[0]}rlite" not in str(caught.value)


def test_a_loss_may_be_nan_at_masked_positions_and_constant_in_a_pack_without_tokens() -> None:
    POLICY_LOSSES["own"] = lambda x: TokenLoss(x.logprobs / x.mask, {})
    inputs = LossInputs(logprobs(), torch.zeros(3), torch.ones(3), torch.tensor([1, 0, 1]))
    assert policy_loss("own", inputs).loss[0] == -1
    POLICY_LOSSES["empty"] = lambda x: TokenLoss(torch.zeros_like(x.logprobs), {})
    policy_loss("empty", LossInputs(logprobs(), torch.zeros(3), torch.ones(3), torch.zeros(3)))


@pytest.mark.parametrize("call", [call_policy_loss, call_preference_loss])
def test_an_evaluation_before_the_first_step_does_not_hide_a_loss_without_a_gradient(call: Callable[..., None]) -> None:
    def constant(inputs: Any, *others: Any, **options: Any) -> Any:
        return TokenLoss(inputs.mask, {}) if isinstance(inputs, LossInputs) else inputs.detach()

    with torch.no_grad():
        call(constant)
    with pytest.raises(ConfigError, match="returned a loss without a gradient"):
        call(constant)
