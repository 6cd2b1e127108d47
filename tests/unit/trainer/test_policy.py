import math

import pytest
import torch

from rlite.algorithms import POLICY_LOSSES, TokenLogprobs, TokenLoss, gather_logprobs_entropy, next_token, ppo_clip
from rlite.config import load
from rlite.errors import ConfigError
from rlite.trainer.policy import OptimizerOptions, OwnLogprobs, PolicyLoss, SftLoss, schedule
from rlite.trainer.rl.config import ActorOptions, PpoConfig


def pack(lengths, prompt=2, vocab=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    loss_mask = torch.cat([torch.tensor([0] * prompt + [1] * (n - prompt)) for n in lengths])
    return torch.randn(total, vocab, generator=generator, dtype=torch.float64).requires_grad_(), {
        "input_ids": torch.randint(vocab, (total,), generator=generator),
        "loss_mask": loss_mask,
        "logprobs": -torch.rand(total, generator=generator, dtype=torch.float64) * loss_mask,
        "advantages": torch.randn(total, generator=generator, dtype=torch.float64) * loss_mask,
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
    }


def tokens(logits, data):
    return TokenLogprobs(*gather_logprobs_entropy(logits, next_token(data["input_ids"], data["cu_seqlens"])))


def options(**changes):
    return OptimizerOptions(
        **{"lr": 1.0, "weight_decay": 0.0, "scheduler": "cosine", "warmup_steps": 4, "total_steps": 12} | changes
    )


def test_the_schedule_rises_in_the_warm_up_and_ends_at_zero():
    factors = [schedule(step, options()) for step in range(13)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[8] == pytest.approx(0.5)
    assert factors[12] == pytest.approx(0.0)
    assert schedule(10**6, options(scheduler="linear")) == 0.0
    assert schedule(10**6, options(scheduler="constant")) == 1.0
    falling = options(scheduler="polynomial", lr=2.0, lr_end=0.5, power=2.0)
    assert schedule(8, falling) == pytest.approx(0.25 + 0.75 * 0.5**2)
    assert schedule(12, falling) == 0.25


def test_without_old_logprobs_the_gradient_is_that_of_reinforce_with_the_advantage():
    logits, data = pack([5, 7, 4])
    loss, report = PolicyLoss(tis_coef=None)(tokens(logits, data), data)
    loss.backward()
    probs = logits.detach().softmax(-1)
    expected = torch.zeros_like(probs)
    count = int(data["loss_mask"].sum())
    for position in range(len(probs) - 1):
        if data["loss_mask"][position + 1] and position + 1 not in data["cu_seqlens"].tolist():
            one_hot = torch.nn.functional.one_hot(data["input_ids"][position + 1], probs.shape[-1])
            expected[position] = -data["advantages"][position + 1] * (one_hot - probs[position]) / count
    torch.testing.assert_close(logits.grad, expected)
    assert report["clip_fraction"].item() == 0


def test_a_token_that_the_engine_found_half_as_likely_weighs_at_most_the_cap():
    logits, data = pack([6])
    own = OwnLogprobs()(tokens(logits.detach(), data), data)
    data["logprobs"] = (own - math.log(3.0)) * data["loss_mask"]
    plain, _ = PolicyLoss(tis_coef=None)(tokens(logits, data), data)
    capped, report = PolicyLoss(tis_coef=2.0)(tokens(logits, data), data)
    torch.testing.assert_close(capped, 2 * plain)
    assert report["logprob_drift"].item() == pytest.approx(math.log(3.0))


SELECTIVE = {
    "clip_cov": {"share": 0.2, "cov_low": 0.1, "clip_low": 0.9, "clip_high": 9.0},
    "kl_cov": {"share": 0.2},
    "m2po": {"threshold": 0.05},
}


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_weighted_microbatches_add_up_to_the_loss_of_the_whole_batch(name):
    logits, data = pack([5, 9, 4, 6])
    data["old_logprobs"] = data["logprobs"] - 0.3 * data["loss_mask"]
    averages = ({}, {"avg_level": "sequence"}, {"avg_level": "constant", "max_new_tokens": 8})
    for average in averages:
        loss = PolicyLoss(policy_loss=name, options=SELECTIVE.get(name, {}), **average)
        whole, _ = loss(tokens(logits, data), data)
        if name in SELECTIVE:
            own = OwnLogprobs()(tokens(logits.detach(), data), data)
            data["selected"] = loss.select(data, own)
            assert 0 < data["selected"].sum() < data["loss_mask"].sum()
        split = 0.0
        for first, last in ((0, 1), (1, 4)):
            start, end = data["cu_seqlens"][first], data["cu_seqlens"][last]
            part = {key: value[start:end] for key, value in data.items() if key != "cu_seqlens"}
            part["cu_seqlens"] = data["cu_seqlens"][first : last + 1] - start
            split = split + loss(tokens(logits[start:end], part), part)[0] * loss.weight(part) / loss.weight(data)
        torch.testing.assert_close(split, whole)


def test_the_constant_average_needs_its_divisor():
    with pytest.raises(ConfigError, match="max_new_tokens"):
        PolicyLoss(avg_level="constant")


def test_supervised_loss_is_the_mean_surprise_of_the_answer_tokens():
    logits, data = pack([5, 7])
    loss = SftLoss()(tokens(logits, data), data)
    own = OwnLogprobs()(tokens(logits, data), data)
    torch.testing.assert_close(loss, -own[data["loss_mask"].bool()].mean())


def test_a_policy_loss_is_a_name_with_options_or_a_function():
    logits, data = pack([5, 9, 4])
    data["old_logprobs"] = data["logprobs"] - 0.3 * data["loss_mask"]
    default, _ = PolicyLoss(clip_low=0.1, clip_high=0.4)(tokens(logits, data), data)
    named, _ = PolicyLoss(options={"clip_low": 0.1, "clip_high": 0.4})(tokens(logits, data), data)
    torch.testing.assert_close(named, default)
    wide, _ = PolicyLoss(policy_loss="gspo", options={"clip_low": 1.0, "clip_high": 9.0})(tokens(logits, data), data)
    narrow, report = PolicyLoss(policy_loss="gspo")(tokens(logits, data), data)
    assert wide != narrow
    assert report["clip_fraction"].item() > 0

    def own(logprobs, old_logprobs, advantages, *, gain):
        return TokenLoss(-gain * advantages * logprobs, {"gain": torch.full_like(advantages, gain)})

    loss, report = PolicyLoss(policy_loss=own, options={"gain": 3.0}, tis_coef=None)(tokens(logits, data), data)
    assert report["gain"].item() == 3.0
    assert loss.requires_grad


def test_a_policy_loss_that_cannot_work_is_refused_before_training():
    with pytest.raises(ConfigError, match="of ppo_clip alone, not of gspo"):
        PolicyLoss(policy_loss="gspo", clip_high=0.28)
    assert PolicyLoss().policy_loss is ppo_clip
    with pytest.raises(ConfigError, match=r"kl\.loss_estimator=k1: its gradient .* is 0 in expectation"):
        PolicyLoss(kl_coef=0.1, kl_estimator="k1")
    with pytest.raises(ConfigError, match=r"kl\.loss_estimator=k1: .* Use k2"):
        load(PpoConfig, ["actor.model_name=m", "kl.loss_estimator=k1"])
    with pytest.raises(ConfigError, match=r"policy_loss: unknown policy loss 'gpso'; did you mean 'gspo'"):
        load(ActorOptions, ["model_name=m", "policy_loss.name=gpso"])
    with pytest.raises(ConfigError, match=r"policy_loss: policy loss gspo has no option 'clip'; did you mean 'clip_"):
        load(ActorOptions, ["model_name=m", "policy_loss={name: gspo, options: {clip: 0.1}}"])
    actor = load(ActorOptions, ["model_name=m", "policy_loss.name=gspo", "policy_loss.options.clip_low=2e-4"])
    assert actor.policy_loss.options == {"clip_low": 2e-4}
