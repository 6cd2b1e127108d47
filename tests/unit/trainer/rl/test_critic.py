import pytest
import torch

from rlite.config import load
from rlite.trainer.rl.config import PpoConfig
from rlite.trainer.rl.critic import ValueLoss, own_values


def test_a_value_belongs_to_the_state_in_which_its_token_was_chosen():
    data = {"cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32)}
    assert own_values(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), data).tolist() == [0, 1, 2, 0, 4]


def test_the_value_loss_reads_the_scores_that_the_values_came_from():
    data = {
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
        "loss_mask": torch.tensor([0, 1, 1, 0, 1]),
        "returns": torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0]),
    }
    scores = torch.tensor([0.8, 0.5, 9.0, 2.0, 9.0])
    data["values"] = own_values(scores, data)
    loss, report = ValueLoss(clip=0.5)(scores, data)
    assert loss.item() == pytest.approx((0.2**2 + 0.5**2 + 2.0**2) / 2 / 3)
    assert report["value"].item() == pytest.approx((0.8 + 0.5 + 2.0) / 3)
    assert ValueLoss().weight(data) == 3
    data["values"] = data["values"] - 3.0  # the scores have risen too far: the loss is that of the nearest allowed
    clipped, report = ValueLoss(clip=0.5)(scores, data)
    assert clipped.item() == pytest.approx(((-1.7 - 1) ** 2 + (-2.0 - 1) ** 2 + 2.0**2) / 2 / 3)
    assert report["clip_fraction"].item() == pytest.approx(2 / 3)


def test_the_critic_is_as_the_actor_where_it_does_not_say():
    argv = ["actor.model_name=a", "actor.sp_size=2", "actor.lr=1.0", "actor.max_length_per_device=100"]
    config = load(PpoConfig, [*argv, "critic.tp_size=2", "ref_actor.max_length_per_device=50", "kl.type=loss"])
    critic = config.critic.as_model(config.actor)
    assert (critic.model_name, critic.sp_size, critic.tp_size, critic.lr) == ("a", 2, 2, 5e-6)
    assert critic.scheduler == "constant"
    adapted = load(PpoConfig, ["actor.model_name=a", "actor.lora.rank=4", "critic.model_name=b"])
    assert adapted.critic.as_model(adapted.actor).lora == adapted.actor.lora
    assert adapted.ref_actor.as_model(adapted.actor).lora is None
    assert config.max_length == 2 * 50


def test_greedy_evaluation_has_the_length_and_the_stops_of_training():
    config = load(PpoConfig, ["actor.model_name=a", "rollout.train_sampling_params={max_new_tokens: 7, stop: [x]}"])
    evaluation = config.rollout.evaluation_sampling
    assert (evaluation.temperature, evaluation.max_new_tokens, evaluation.stop) == (0.0, 7, ["x"])
