from __future__ import annotations

from typing import Any

import pytest
import torch

from rlite.algorithms import ADVANTAGES, is_of_group_alone, outcome_advantages, register_advantage
from rlite.errors import ConfigError, UnknownOptionError

REWARDS, GROUPS = torch.tensor([1.0, 0.0, 0.0, 3.0]), torch.tensor([0, 0, 1, 1])
GIVEN = {"lengths": torch.tensor([1, 2, 3, 4]), "greedy_rewards": torch.tensor([0.5, 0.5, 1.0, 1.0])}


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_every_estimator_can_be_called_by_its_name(name: str) -> None:
    rewards = torch.stack([REWARDS, REWARDS]) if name == "gdpo" else REWARDS
    advantages = outcome_advantages(name, rewards, GROUPS, **GIVEN)
    assert advantages.shape == (4,)
    assert advantages.argmax() in (0, 3)


def test_options_reach_the_estimator_and_unknown_ones_are_named() -> None:
    raw = outcome_advantages("grpo", REWARDS, GROUPS, options={"norm_std": False})
    assert raw.tolist() == [0.5, -0.5, -1.5, 1.5]
    with pytest.raises(UnknownOptionError, match=r"advantage grpo has no option 'norm_sdt'.*norm_std"):
        ADVANTAGES.check("grpo", {"norm_sdt": True})
    with pytest.raises(UnknownOptionError, match="lengths"):
        ADVANTAGES.check("opo", {"lengths": 3})


def test_missing_inputs_of_an_estimator_are_named() -> None:
    with pytest.raises(ConfigError, match="remax needs greedy_rewards"):
        outcome_advantages("remax", REWARDS, GROUPS)
    with pytest.raises(ConfigError, match=r"unknown advantage 'grop'.*grpo"):
        outcome_advantages("grop", REWARDS, GROUPS)


def test_an_estimator_of_ones_own_says_what_else_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ADVANTAGES, "gpg")  # restored afterwards, and with it the table
    monkeypatch.setitem(ADVANTAGES.needs, "gpg", ())

    @register_advantage("gpg", needs=("lengths",))
    def shortest(rewards: torch.Tensor, group_ids: torch.Tensor, *, lengths: torch.Tensor, bonus: float = 1.0):
        return rewards - bonus * lengths

    assert outcome_advantages("gpg", REWARDS, GROUPS, **GIVEN, options={"bonus": 2.0}).tolist() == [-1, -4, -6, -5]
    with pytest.raises(ConfigError, match="gpg needs lengths"):
        outcome_advantages("gpg", REWARDS, GROUPS)
    with pytest.raises(ConfigError, match=r"found length$"):
        register_advantage("mine", needs=("length",))
    assert not is_of_group_alone("gpg", {}, 2)
    with pytest.raises(ConfigError, match=r"missing a required .*'lengths'"):
        ADVANTAGES.check(lambda rewards, group_ids, *, lengths: rewards, {})


def test_a_function_of_ones_own_is_an_estimator_with_or_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ADVANTAGES, "gpg")  # restored afterwards, and with it the table
    own = register_advantage("gpg")(lambda rewards, group_ids, *, scale=1.0: scale * rewards)
    assert torch.equal(outcome_advantages("gpg", REWARDS, GROUPS, options={"scale": 2.0}), 2 * REWARDS)
    assert torch.equal(outcome_advantages(own, REWARDS, GROUPS), REWARDS)
    with pytest.raises(ConfigError, match="'gpg' is taken"):
        register_advantage("gpg")(lambda rewards, group_ids: rewards)


@pytest.mark.parametrize(
    ("estimator", "options", "expected"),
    [
        *((name, {}, True) for name in ("dr_grpo", "grpo", "rloo", "opo", "pass_at_k", "normalized")),
        ("gpg", {}, False),
        ("normalized", {"mean": "batch"}, False),
        ("normalized", {"std": "batch"}, False),
        ("normalized", {"mean": None}, False),
        (lambda rewards, group_ids: rewards - rewards.median(), {}, False),
        (lambda rewards, group_ids: rewards * 0, {}, True),
    ],
)
def test_dependence_on_the_group_alone_is_detected(estimator: Any, options: dict[str, Any], expected: bool) -> None:
    assert all(is_of_group_alone(estimator, options, size) is expected for size in (2, 3, 8))
