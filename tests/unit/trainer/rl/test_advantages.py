import json

import pytest
import torch
from tensordict import TensorDict

from rlite.algorithms import gae, group_advantages
from rlite.errors import ConfigError, DataError
from rlite.trainer.rl.objective import compute_advantages, token_rewards
from rlite.trainer.rl.options import AdvantageOptions, KlOptions
from tests.oracles.cases import HERE


def batch(**more):
    """Two prompts with two responses; the second response of the first prompt is two sequences."""
    loss_mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 0, 1]])
    return TensorDict(
        {
            "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]),
            "loss_mask": loss_mask,
            "rewards": torch.tensor([1.0, 0.25, 0.25, 0.7, 0.7]),
            "token_rewards": torch.tensor(
                [[0, 0, 1.0, 0], [0, 0.5, 0, 0], [0, 0, 0, -0.25], [0, 0, 0.7, 0], [0, 0, 0, 0.7]]
            ),
            "group_ids": torch.tensor([3, 3, 3, 8, 8]),
            "sequence_index": torch.tensor([0, 0, 1, 0, 0]),
            "old_logprobs": -0.5 * loss_mask,
            "ref_logprobs": -2.5 * loss_mask,
            **more,
        },
        batch_size=[5],
    )


def credit(data, kl=None, is_single=False, **adv):
    return compute_advantages(data, AdvantageOptions(**adv), kl or KlOptions(), is_single)


def test_a_trajectory_of_two_sequences_is_one_member_of_its_group():
    advantages = credit(batch())["advantages"]
    mask = batch()["loss_mask"]
    expected = torch.tensor([0.375, -0.375, -0.375, 0.0, 0.0])
    torch.testing.assert_close(advantages, expected[:, None] * mask)


def test_an_outcome_counts_once_however_many_sequences_a_trajectory_has():
    # 0.25 of the second trajectory lies on the last action of its second row, not on that of its first row too
    data = batch().exclude("token_rewards")
    assert token_rewards(data).nonzero().tolist() == [[0, 2], [2, 3], [3, 2], [4, 3]]
    torch.testing.assert_close(credit(data)["advantages"], credit(batch())["advantages"])
    data["loss_mask"] = data["loss_mask"].clone()
    data["loss_mask"][2] = 0
    assert token_rewards(data).nonzero().tolist() == [[0, 2], [1, 1], [3, 2], [4, 3]], "where something was written"


@pytest.mark.parametrize("has_token_rewards", [False, True])
def test_reward_of_a_trajectory_without_actions_counts_in_its_group(has_token_rewards):
    data = TensorDict(
        {
            "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]]),
            "loss_mask": torch.tensor([[0, 1, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]]),
            "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0]),
            "group_ids": torch.zeros(4, dtype=torch.int64),
            "sequence_index": torch.tensor([0, 0, 0, 1]),
        },
        batch_size=[4],
    )
    if has_token_rewards:
        data["token_rewards"] = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.25, 0.0], [0.75, 0.0, 0.0]])
    torch.testing.assert_close(
        credit(data)["advantages"], torch.tensor([[0, 1 / 3, 1 / 3], [0, -2 / 3, 0], [0, 0, 0], [0, 0, 0]])
    )


def test_a_single_response_to_each_prompt_has_the_batch_as_its_group():
    advantages = credit(batch(), is_single=True)["advantages"]
    mean = (1.0 + 0.25 + 0.7 + 0.7) / 4
    torch.testing.assert_close(advantages[:, 1], torch.tensor([1 - mean, 0.25 - mean, 0, 0.7 - mean, 0.7 - mean]))
    torch.testing.assert_close(credit(batch(), global_norm=True)["advantages"], advantages)


def test_the_deviation_is_that_of_the_level_that_the_mean_has():
    outcomes, groups = torch.tensor([1.0, 0.25, 0.7, 0.7]).double(), torch.tensor([3, 3, 8, 8])
    for is_global in (False, True):
        found = credit(batch(), norm_var=True, global_norm=is_global)["advantages"]
        expected = group_advantages(outcomes, groups * (not is_global), norm_std=True)
        torch.testing.assert_close(found[[0, 1, 3, 4], 1].double(), expected, rtol=1e-6, atol=1e-6)


def test_gae_runs_through_all_sequences_of_a_trajectory_and_over_actions_alone():
    data = batch(values=torch.rand(5, 4))
    found = credit(data, estimator="gae", gamma=0.9, lamda=0.8)
    # the second trajectory: its three actions side by side
    rewards = torch.tensor([[0.5, 0.0, -0.25]])
    values = torch.stack([data["values"][1, 1], data["values"][2, 2], data["values"][2, 3]])[None]
    advantages, returns = gae(rewards, values, torch.ones(1, 3), 0.9, 0.8)
    for key, expected in (("advantages", advantages), ("returns", returns)):
        torch.testing.assert_close(torch.cat([found[key][1, 1:2], found[key][2, 2:]]), expected[0])
        assert (found[key][data["loss_mask"] == 0] == 0).all()


def test_gae_is_whitened_over_the_tokens_of_the_batch_where_asked():
    data = batch(values=torch.rand(5, 4))
    mask = data["loss_mask"].bool()
    plain = credit(data.clone(), estimator="gae")["advantages"][mask]
    centred = credit(data.clone(), estimator="gae", global_norm=True)["advantages"][mask]
    torch.testing.assert_close(centred, plain - plain.mean())
    white = credit(data.clone(), estimator="gae", global_norm=True, norm_var=True)["advantages"][mask]
    torch.testing.assert_close(white, (plain - plain.mean()) / plain.std())
    scaled = credit(data.clone(), estimator="gae", norm_var=True)["advantages"][mask]
    torch.testing.assert_close(scaled, plain / plain.std())


def test_equal_advantages_have_no_deviation_to_be_divided_by():
    data = batch(values=torch.zeros(5, 4), loss_mask=batch()["loss_mask"] * torch.tensor([1, 0, 0, 0, 0])[:, None])
    assert credit(data.clone(), estimator="gae", norm_var=True)["advantages"].unique().tolist() == [0.0, 1.0]
    assert credit(data, estimator="gae", norm_var=True, global_norm=True)["advantages"].unique().tolist() == [0.0]


def test_the_kl_is_paid_of_rewards_or_of_advantages():
    plain = credit(batch())["advantages"]
    mask = batch()["loss_mask"]
    paid = credit(batch(), KlOptions(type="advantage", coef=0.1))["advantages"]
    torch.testing.assert_close(paid, plain - 0.1 * 2.0 * mask)
    # of rewards: the outcomes lose 0.2 for each of 2, 3, 2 and 2 action tokens
    paid = credit(batch(), KlOptions(type="reward", coef=0.1))["advantages"]
    torch.testing.assert_close(paid[:, 1], torch.tensor([0.475, -0.475, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(credit(batch(), KlOptions(type="loss"))["advantages"], plain)


def test_a_discount_makes_late_rewards_worth_less():
    advantages = credit(batch(), gamma=0.5)["advantages"]
    first, second = 1.0 * 0.5, 0.5 - 0.25 * 0.25
    torch.testing.assert_close(advantages[0, 1], torch.tensor((first - second) / 2))


def test_estimators_by_name_count_the_tokens_of_the_whole_trajectory():
    found = credit(batch(), estimator="opo")["advantages"]
    baseline = (2 * 1.0 + 3 * 0.25) / 5
    torch.testing.assert_close(found[:3].amax(1) + found[:3].amin(1), torch.tensor([1.0, 0.25, 0.25]) - baseline)
    with pytest.raises(ConfigError, match=r"adv\.estimator=roo: unknown estimator; did you mean 'rloo'"):
        AdvantageOptions(estimator="roo")
    with pytest.raises(ConfigError, match=r"it has no adv\.norm_var=true"):
        AdvantageOptions(estimator="rloo", norm_var=True)


def test_a_reward_for_the_whole_response_lies_on_its_last_action():
    data = batch().exclude("token_rewards", "sequence_index")
    assert token_rewards(data).nonzero().tolist() == [[0, 2], [1, 1], [2, 3], [3, 2], [4, 3]]


@pytest.mark.parametrize("estimator", ["reinforce", "gae"])
def test_advantages_join_a_new_batch_that_shares_the_tensors(estimator):
    before = batch(values=torch.zeros(5, 4))
    after = credit(before, KlOptions(type="reward"), estimator=estimator)
    assert set(after.keys()) - set(before.keys()) == {"advantages", *(["returns"] if estimator == "gae" else [])}
    assert all(after[key] is before[key] for key in before.keys())  # noqa: SIM118


def oracle(name, kinds):
    """Return the cases of a file whose kind or mode has one of these words."""
    cases = json.loads((HERE / f"{name}.json").read_text())["cases"]
    return [pytest.param(case, id=case["id"]) for case in cases if any(kind in case["id"] for kind in kinds)]


def as_batch(raw, mask, **more):
    mask = torch.tensor(mask)
    columns = {"attention_mask": torch.ones_like(mask), "loss_mask": mask, "rewards": torch.zeros(len(mask)), **more}
    return TensorDict({**columns, "group_ids": torch.tensor(raw["inputs"]["group_ids"])}, batch_size=[len(mask)])


@pytest.mark.parametrize("raw", oracle("02d_adv_reinforce_pp", ["public"]))
def test_whitened_advantages_are_verls(raw):
    data = as_batch(raw, raw["inputs"]["mask"], token_rewards=torch.tensor(raw["inputs"]["token_rewards"]))
    found = {"reinforce_pp": credit(data, estimator="reinforce_pp", gamma=raw["params"]["gamma"])}
    if raw["kind"] != "singleton":  # verl's baseline leaves the reward of a group of one as it is
        found["reinforce_pp_baseline"] = credit(data, estimator="reinforce_pp_baseline")
    for name, credited in found.items():
        expected = torch.tensor(raw["expected"][f"{name}_advantages"])
        torch.testing.assert_close(credited["advantages"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("raw", oracle("02h_adv_sequence_level_variants", ["multi_norm_then_sum"]))
def test_advantages_of_several_rewards_are_trls(raw):
    kinds = torch.tensor(raw["inputs"]["reward_components"])
    data = as_batch(raw, [[0, 1]] * kinds.shape[1], **{f"reward/{name}": kinds[i] for i, name in enumerate("ab")})
    adv = AdvantageOptions(estimator="gdpo", options={"eps": raw["params"]["eps"]})
    weights = dict(zip("ba", reversed(raw["params"]["weights"]), strict=True))
    found = compute_advantages(data, adv, KlOptions(), False, weights=weights)["advantages"][:, 1]
    torch.testing.assert_close(found, torch.tensor(raw["expected"]["sequence_advantages"]), rtol=2e-5, atol=1e-5)


def test_a_reward_that_does_not_count_adds_nothing_and_its_group_is_compared_without_it():
    kinds = {"reward/a": torch.tensor([1.0, 0.0, 0.0, 2.0, 3.0])}
    alone = credit(batch(**kinds), estimator="gdpo", options={"batch_norm": False})["advantages"]
    kinds["reward/b"] = torch.full((5,), torch.nan)
    torch.testing.assert_close(
        credit(batch(**kinds), estimator="gdpo", options={"batch_norm": False})["advantages"], alone
    )
    with pytest.raises(DataError, match="the batch has no reward/NAME"):
        credit(batch(), estimator="gdpo")
