import math

import pytest
import torch

from rlite.algorithms import TokenLogprobs, gather_logprobs_entropy, next_token
from rlite.errors import ConfigError
from rlite.trainer.policy import OptimizerOptions, OwnLogprobs, PolicyLoss, SftLoss, schedule


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
    assert report["clip_fraction"] == 0


def test_a_token_that_the_engine_found_half_as_likely_weighs_at_most_the_cap():
    logits, data = pack([6])
    own = OwnLogprobs()(tokens(logits.detach(), data), data)
    data["logprobs"] = (own - math.log(3.0)) * data["loss_mask"]
    plain, _ = PolicyLoss(tis_coef=None)(tokens(logits, data), data)
    capped, report = PolicyLoss(tis_coef=2.0)(tokens(logits, data), data)
    torch.testing.assert_close(capped, 2 * plain)
    assert report["logprob_drift"] == pytest.approx(math.log(3.0))


def test_weighted_microbatches_add_up_to_the_loss_of_the_whole_batch():
    logits, data = pack([5, 9, 4, 6])
    for loss in (PolicyLoss(), PolicyLoss(avg_level="sequence"), PolicyLoss(avg_level="constant", max_new_tokens=8)):
        whole, _ = loss(tokens(logits, data), data)
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
