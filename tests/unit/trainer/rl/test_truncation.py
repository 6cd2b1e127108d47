"""Training on what was sampled: a bandit whose policy gradient is known, the KL beside it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.algorithms import next_token
from rlite.algorithms.kept_ids import KeptIds
from rlite.backends.serving.sampler import Sampling, SamplingBatch, sample, uniforms
from rlite.data.packs import TokenHistory
from rlite.errors import ConfigError, DataError
from rlite.nn import linear_logprobs
from rlite.rollout import RolloutWorkflow
from rlite.trainer.options import SamplingOptions
from rlite.trainer.rl.objective import BothLogprobs, OwnLogprobs, PolicyLoss, compute_advantages
from rlite.trainer.rl.options import AdvantageOptions, KlOptions, RolloutOptions
from rlite.trainer.rl.truncation import check_engine, check_kept
from rlite.types import GenerationHyperparameters

NUM_DRAWS = 200_000
PREFERENCES = torch.tensor([1.2, 0.9, 0.3, 0.0, -0.6, -1.0], dtype=torch.float64)
REWARDS = torch.tensor([0.2, 1.0, 0.6, 2.0, 3.0, 1.0], dtype=torch.float64)
SAMPLING = GenerationHyperparameters(top_p=0.8)
"""keeps arms 0 to 3"""


def draws(count: int = NUM_DRAWS) -> dict[str, Tensor]:
    """One pack of sequences of two tokens, a prompt and an arm, drawn by the embedded engine's sampler."""
    row = Sampling(SAMPLING, seed=0, has_kept_ids=True)
    batch = SamplingBatch.of([row] * count, len(PREFERENCES), torch.device("cpu"))
    made = sample(PREFERENCES.float().expand(count, -1), batch, uniforms(torch.arange(count), torch.tensor(5)))
    assert made.kept is not None
    steps = torch.zeros(count, 2, dtype=torch.long)

    def after_prompt(values: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(values), values], 1).flatten()

    counts = torch.bincount(made.kept[:, 0], minlength=count)
    return {
        "input_ids": after_prompt(made.tokens),
        "loss_mask": after_prompt(torch.ones(count, dtype=torch.long)),
        "advantages": after_prompt(REWARDS[made.tokens]),
        "logprobs": after_prompt(made.sampling_logprobs.double()),
        "full": after_prompt(made.logprobs.double()),
        "kept_counts": after_prompt(counts).int(),
        "kept_ids": made.kept[:, 1].int(),
        "cu_seqlens": torch.arange(0, steps.numel() + 1, 2, dtype=torch.int32),
    }


def estimate(policy: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Return the trainer's estimate of the gradient of the expected reward, from a head of one hidden unit."""
    weight, hidden = policy.clone()[:, None].requires_grad_(), torch.ones(len(data["input_ids"]), 1, dtype=policy.dtype)
    labels = next_token(data["input_ids"], data["cu_seqlens"])
    tokens = linear_logprobs(hidden, weight, labels, block_size=4, replay=KeptIds.of_pack(data))
    loss, _ = PolicyLoss(tis_coef=None, clip_low=1.0, clip_high=100.0)(tokens, data)
    loss.backward()
    return -weight.grad[:, 0]


def over_kept(policy: Tensor) -> Tensor:
    """Return the distribution that is sampled."""
    return torch.where(torch.arange(len(policy)) < 4, policy, -torch.inf).softmax(0)


@pytest.mark.parametrize("is_moved", [False, True])
def test_the_gradient_of_a_bandit_is_the_true_one_with_replay_and_biased_without(is_moved: bool) -> None:
    behaviour = over_kept(PREFERENCES)
    policy = PREFERENCES + (torch.linspace(-0.5, 0.5, len(PREFERENCES)) if is_moved else 0.0)
    leaf = policy.clone().requires_grad_()
    (over_kept(leaf) * REWARDS).sum().backward()
    true = leaf.grad
    # of one draw, by enumeration: the ratio, times the reward, times the gradient of the log-probability
    each = (over_kept(policy) / behaviour * REWARDS)[:, None] * (torch.eye(len(policy)) - over_kept(policy))
    each = each.nan_to_num()
    torch.testing.assert_close((behaviour[:, None] * each).sum(0), true)
    error = ((behaviour[:, None] * (each - true) ** 2).sum(0) / NUM_DRAWS).sqrt()
    data = draws()
    if is_moved:
        data["old_logprobs"] = data["logprobs"]
    found = estimate(policy, data)
    assert ((found - true).abs() < 4.5 * error + 1e-6).all()
    whole = {key: value for key, value in data.items() if not key.startswith("kept")} | {"logprobs": data["full"]}
    if is_moved:
        whole["old_logprobs"] = data["full"]
    without = estimate(policy, whole)
    assert ((without - true).abs() > 10 * error + 1e-3).sum() >= 3, "far beyond the noise"


def test_the_kl_to_the_reference_and_the_entropy_are_over_the_vocabulary() -> None:
    data = draws(10)
    data["ref_logprobs"] = data["full"]
    weight, hidden = PREFERENCES[:, None], torch.ones(20, 1, dtype=torch.float64)
    labels = next_token(data["input_ids"], data["cu_seqlens"])
    tokens = linear_logprobs(hidden, weight, labels, replay=KeptIds.of_pack(data))
    _, report = PolicyLoss(kl_coef=1.0, kl_estimator="k2")(tokens, data)
    assert float(report["kl"].total) == pytest.approx(0.0, abs=1e-9), "the reference is the policy"
    assert float(report["logprob_drift"].total) == pytest.approx(0.0, abs=1e-5)
    full = PREFERENCES.log_softmax(0)
    assert float(report["entropy"].total / report["entropy"].count) == pytest.approx(float(-(full.exp() * full).sum()))
    actions = data["loss_mask"].bool()
    own, whole, both = (
        hook(tokens, data)[actions] for hook in (OwnLogprobs(), OwnLogprobs(is_full=True), BothLogprobs())
    )
    torch.testing.assert_close(own, over_kept(PREFERENCES).log()[data["input_ids"][actions]])
    torch.testing.assert_close(whole, full[data["input_ids"][actions]])
    assert torch.equal(both, torch.stack([own, whole], -1))


def test_the_kl_in_the_reward_is_over_the_vocabulary() -> None:
    batch = TensorDict(
        {
            "input_ids": torch.tensor([[1, 2], [1, 3]]),
            "attention_mask": torch.ones(2, 2, dtype=torch.bool),
            "loss_mask": torch.tensor([[False, True], [False, True]]),
            "rewards": torch.zeros(2),
            "group_ids": torch.zeros(2, dtype=torch.long),
            "old_logprobs": torch.tensor([[0.0, -0.1], [0.0, -0.2]]),
            "full_old_logprobs": torch.tensor([[0.0, -1.0], [0.0, -3.0]]),
            "ref_logprobs": torch.tensor([[0.0, -2.0], [0.0, -2.0]]),
        },
        batch_size=[2],
    )
    made = compute_advantages(batch, AdvantageOptions(), KlOptions(type="advantage", coef=0.5), False)
    assert made["advantages"][:, 1].tolist() == pytest.approx([-0.5, 0.5])


class Dropping(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None: ...


def options_of(**sampling: Any) -> RolloutOptions:
    return RolloutOptions(executor="vllm", train_sampling_params=SamplingOptions(**sampling))


def test_an_executor_without_kept_ids_is_refused_if_training_truncates() -> None:
    for sampling in ({"top_p": 0.9}, {"top_k": 20}):
        with pytest.raises(ConfigError, match=r"executor=vllm does not return .*top_p=1 and top_k=0.*executor=torch"):
            check_engine(options_of(**sampling), ())
        check_engine(options_of(**sampling), {"kept_ids"})
    for plain in ({}, {"temperature": 0.5}, {"temperature": 0.0, "top_p": 0.9}):
        check_engine(options_of(**plain), ())


def test_a_workflow_that_drops_kept_ids_is_refused_if_training_truncates() -> None:
    history = TokenHistory()
    history.read([1])
    history.write([2], [-1.0], [0], "stop")
    with pytest.raises(DataError, match=r"top_p=0.9, top_k=0.*trajectories of Dropping have no kept_ids"):
        check_kept(history.row(), options_of(top_p=0.9), Dropping())
    check_kept(history.row(), options_of(), Dropping())
    history.write([3], [-1.0], [0], "stop", [[3, 4]])
    check_kept(history.row(), options_of(top_p=0.9), Dropping())
