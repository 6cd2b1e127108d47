import math

import pytest
import torch
from tensordict import TensorDict

from rlite.config import load
from rlite.observability import stats_tracker
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.rl.statistics import report_off_policy


def test_the_distance_from_the_sampler_is_reported_over_action_tokens():
    old = torch.tensor([[0.0, -1.0, -2.0], [0.0, -1.0, -9.0]], dtype=torch.float64)
    sampler = torch.tensor([[0.0, -1.5, -2.5], [0.0, -1.2, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    stats_tracker.export()
    report_off_policy(TensorDict({"old_logprobs": old, "logprobs": sampler, "loss_mask": mask}, batch_size=[2]), 1.5)
    found = stats_tracker.export()
    assert found["off_policy/kl"] == pytest.approx(-(0.5 + 0.5 + 0.2) / 3)
    assert found["off_policy/perplexity"] == pytest.approx((math.exp(1.5) + math.exp(1.0)) / 2)
    assert found["off_policy/log_perplexity_gap_min"] == pytest.approx(-0.5)
    assert found["off_policy/chi2_sequence"] == pytest.approx((math.exp(2.0) + math.exp(0.4)) / 2 - 1)
    weights = [1.5, 1.5, math.exp(0.2)]
    assert found["off_policy/weight_mean"] == pytest.approx(sum(weights) / 3)
    assert found["off_policy/weight_effective_fraction"] == pytest.approx(
        sum(weights) ** 2 / 3 / sum(w**2 for w in weights)
    )


def test_old_logprobs_are_computed_where_something_is_measured_from_them():
    argv = ["actor.model_name=m"]
    assert not load(PpoConfig, argv).has_old_logprobs
    for option in (
        "actor.off_policy_metrics=true",
        "kl.type=reward",
        "kl.type=advantage",
        "actor.update_per_rollout=2",
    ):
        assert load(PpoConfig, [*argv, option]).has_old_logprobs
