from rlite.config import load
from rlite.trainer.options import SetSamplingOptions
from rlite.trainer.rl.options import PpoConfig


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
    evaluation = config.rollout.sampling_of(SetSamplingOptions())
    assert (evaluation.temperature, evaluation.max_new_tokens, evaluation.stop) == (0.0, 7, ["x"])
