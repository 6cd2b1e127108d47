from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.algorithms import Branch, aggregate, register_credit
from rlite.errors import ConfigError
from rlite.trainer.rl.credit import credited_advantages
from rlite.trainer.rl.filtering import varied_groups
from rlite.trainer.rl.objective import compute_advantages
from rlite.trainer.rl.options import AdvantageOptions, KlOptions, PpoConfig

LENGTHS = (1, 3, 2)
"""tokens of the rows: an episode of two branches, and an episode of one"""


def batch(**more: Any) -> TensorDict:
    """One prompt, two episodes with the rewards 1 and 0; the first has branches of 1 and of 3 tokens."""
    mask = torch.arange(4)[None] < torch.tensor(LENGTHS)[:, None]
    columns = {
        "attention_mask": torch.ones(3, 4, dtype=torch.bool),
        "loss_mask": mask,
        "rewards": torch.tensor([1.0, 1.0, 0.0]),
        "group_ids": torch.tensor([5, 5, 5]),
        "sequence_index": torch.tensor([0, 1, 0]),
        **more,
    }
    return TensorDict(columns, batch_size=[3])


def credited(data: TensorDict, credit: str, num_seats: int = 1, is_single: bool = False) -> Tensor:
    options = {"adv": AdvantageOptions(credit=credit), "kl": KlOptions(), "is_single": is_single}
    return credited_advantages(data, num_seats=num_seats, **options)["advantages"]


def gradient(advantages: Tensor, level: Any) -> Tensor:
    """Return the gradient of -mean(A log p) by a logit of each row, where p = sigmoid(0) at each of its tokens."""
    mask, logits = batch()["loss_mask"], torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
    logprobs = torch.nn.functional.logsigmoid(logits).expand(3, 4)
    aggregate(-advantages.double() * logprobs, mask, level).backward()
    return -logits.grad[:, 0] * 2 * (mask.sum() if level == "token" else 3)


A = 0.5  # of the first episode: 1 less the mean 1/2; that of the second is -A
CASES = {
    # sum over tokens of A x factor: each token of the episode counts the same
    ("episode", "token"): [1 * A, 3 * A, -2 * A],
    # factors T_b / T = 1/4 and 3/4
    ("tokens", "token"): [1 * A / 4, 3 * A * 3 / 4, -2 * A],
    # factors 1/K = 1/2: an episode of K branches weighs as its mean branch
    ("branches", "token"): [1 * A / 2, 3 * A / 2, -2 * A],
    # mean over the tokens of each row: an episode weighs once for each of its branches
    ("episode", "sequence"): [A, A, -A],
    # ... and once in all: as the mean over its tokens
    ("tokens", "sequence"): [A / 4, A * 3 / 4, -A],
    # ... or as the mean of its branches
    ("branches", "sequence"): [A / 2, A / 2, -A],
}


@pytest.mark.parametrize(("credit", "level"), CASES)
def test_each_rule_of_credit_has_its_known_gradient(credit: str, level: str) -> None:
    assert gradient(credited(batch(), credit), level).tolist() == pytest.approx(CASES[credit, level])


def test_with_own_rewards_each_branch_is_a_member_of_its_group() -> None:
    own = torch.zeros(3, 4)
    own[:, 0] = torch.tensor([0.75, 0.25, 0.0])
    found = credited(batch(token_rewards=own), "own")
    mean = 1 / 3
    assert found[:, 0].tolist() == pytest.approx([0.75 - mean, 0.25 - mean, -mean])
    shared = credited(batch(token_rewards=own), "episode")
    assert shared[:, 0].tolist() == pytest.approx([A, A, -A]), "the episode's reward is the sum of its branches'"


def test_the_default_is_the_function_without_credit() -> None:
    given = {"adv": AdvantageOptions(), "kl": KlOptions(), "is_single": False}
    assert credited(batch(), "episode").equal(compute_advantages(batch(), **given)["advantages"])


def test_an_own_rule_sees_rewards_and_advantages_of_the_branches() -> None:
    seen: list[list[Branch]] = []

    @register_credit("longest_alone")
    def longest_alone(branches: Any) -> list[float]:
        seen.append(branches)
        return [float(branch.num_tokens == max(other.num_tokens for other in branches)) for branch in branches]

    found = credited(batch(), "longest_alone")
    assert found.sum(1).tolist() == pytest.approx([0.0, 3 * A, -2 * A])
    assert seen == [[Branch(1, 1.0, A), Branch(3, 1.0, A)], [Branch(2, 0.0, -A)]]

    register_credit("too_few")(lambda branches: [1.0])
    with pytest.raises(ConfigError, match=r"adv.credit=too_few returned \[1.0\]; expected .* each of 2 branches"):
        credited(batch(), "too_few")


def test_an_unknown_credit_is_refused_with_the_nearest() -> None:
    with pytest.raises(Exception, match="did you mean 'tokens'"):
        AdvantageOptions(credit="token")


def test_own_rewards_teach_also_in_groups_of_equal_episodes() -> None:
    options = PpoConfig(actor={"model_name": "x"}, adv={"credit": "own"})
    assert options.equal_rewards.can_teach
    assert not options.has_dynamic_filtering


def seats(rewards: list[float], **more: Any) -> TensorDict:
    """Two episodes of two seats, which have a trajectory each."""
    columns = {
        "attention_mask": torch.ones(4, 2, dtype=torch.bool),
        "loss_mask": torch.ones(4, 2, dtype=torch.bool),
        "rewards": torch.tensor(rewards),
        "group_ids": torch.zeros(4, dtype=torch.int64),
        "sequence_index": torch.zeros(4, dtype=torch.int64),
        "seat_ids": torch.tensor([0, 1, 0, 1]),
        **more,
    }
    return TensorDict(columns, batch_size=[4])


@pytest.mark.parametrize("is_single", [False, True])
def test_each_seat_has_a_baseline_of_its_own(is_single: bool) -> None:
    data = seats([1.0, 10.0, 0.0, 30.0])
    if is_single:
        data["group_ids"] = torch.tensor([0, 0, 1, 1])
    found = credited(data, "episode", num_seats=2, is_single=is_single)
    assert found[:, 0].tolist() == [0.5, -10.0, -0.5, 10.0]
    assert not is_single or data["group_ids"].tolist() == [0, 0, 1, 1], "the collector's numbers stay"


def test_a_group_varies_if_one_of_its_seats_does() -> None:
    assert varied_groups(seats([1.0, -1.0, 1.0, -1.0])).tolist() == [], "zero-sum, and every episode ended alike"
    assert varied_groups(seats([1.0, -1.0, -1.0, 1.0])).tolist() == [0]
