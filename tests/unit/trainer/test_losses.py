import dataclasses
import itertools
import math

import pytest
import torch

from rlite.algorithms import (
    POLICY_LOSSES,
    TokenLogprobs,
    TokenLoss,
    gather_logprobs_entropy,
    next_token,
    ppo_clip,
    previous_token,
    rejection_mask,
)
from rlite.config import load
from rlite.errors import ConfigError, UnknownOptionError
from rlite.trainer.losses import DpoLoss, KtoLoss, RewardModelLoss, SftLoss, ValueLoss, own_values
from rlite.trainer.rl.objective import OwnLogprobs, PolicyLoss, predicts_counted
from rlite.trainer.rl.options import ActorOptions, PpoConfig
from rlite.trainer.supervised_options import PreferenceLossOptions


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


@pytest.mark.parametrize("name", ["loss", "entropy", "reward", "lr", "step", "weight"])
def test_a_metric_of_a_policy_loss_neither_replaces_one_of_rlite_nor_vanishes(name):
    def own(inputs):
        return TokenLoss(-inputs.logprobs, {name: torch.full_like(inputs.advantages, 7.0), "own": inputs.advantages})

    logits, data = pack([5, 7, 4])
    _, report = PolicyLoss(policy_loss=own)(tokens(logits, data), data)
    assert report[f"policy_loss/{name}"].item() == 7
    assert name not in report or report[name].item() != 7
    assert "own" in report


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

    def own(inputs, *, gain):
        return TokenLoss(-gain * inputs.advantages * inputs.logprobs, {"gain": torch.full_like(inputs.logprobs, gain)})

    loss, report = PolicyLoss(policy_loss=own, options={"gain": 3.0}, tis_coef=None)(tokens(logits, data), data)
    assert report["gain"].item() == 3.0
    assert loss.requires_grad


def test_a_policy_loss_that_cannot_work_is_refused_before_training():
    with pytest.raises(ConfigError, match="not of gspo: its clip range has another scale; set actor"):
        PolicyLoss(policy_loss="gspo", clip_high=0.28)
    assert PolicyLoss().policy_loss is ppo_clip
    with pytest.raises(ConfigError, match=r"kl\.loss_estimator=k1: its gradient .* is 0 in expectation"):
        PolicyLoss(kl_coef=0.1, kl_estimator="k1")
    with pytest.raises(ConfigError, match=r"kl\.loss_estimator=k1: its gradient is that of log pi, which is 0"):
        load(PpoConfig, ["actor.model_name=m", "kl.loss_estimator=k1"])
    with pytest.raises(ConfigError, match=r"^policy_loss\.name=gpso: unknown policy loss 'gpso'; did you mean 'gspo'"):
        load(ActorOptions, ["model_name=m", "policy_loss.name=gpso"])
    with pytest.raises(ConfigError, match=r"policy_loss: policy loss gspo has no option 'clip'; did you mean 'clip_"):
        load(ActorOptions, ["model_name=m", "policy_loss={name: gspo, options: {clip: 0.1}}"])
    actor = load(ActorOptions, ["model_name=m", "policy_loss.name=gspo", "policy_loss.options.clip_low=2e-4"])
    assert actor.policy_loss.options == {"clip_low": 2e-4}


def test_losses_on_pairs_name_what_they_report():
    data = {
        "cu_seqlens": torch.tensor([0, 3, 6], dtype=torch.int32),
        "loss_mask": torch.tensor([0, 1, 1, 0, 1, 1]),
        "ref_logprobs": -torch.rand(6),
        "is_chosen": torch.tensor([1, 0]),
    }
    scores = torch.randn(6)
    for loss, outputs in ((RewardModelLoss(), scores), (DpoLoss(), TokenLogprobs(scores, scores))):
        _, report = loss(outputs, data)
        assert set(report) == set(loss.reported)


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


@pytest.mark.parametrize("scope", ["token", "sequence"])
def test_rejected_tokens_have_no_loss_and_stay_in_the_divisor(scope):
    logits, data = pack([5, 9, 4, 6])
    data["old_logprobs"] = data["logprobs"] - 0.4 * torch.rand(24, generator=torch.Generator().manual_seed(3))
    data["ref_logprobs"] = data["logprobs"] - 0.1
    options = {"upper": 0.015, "estimator": "k3", "scope": scope}
    rest = {"entropy_coef": 0.1, "kl_coef": 0.2, "tis_coef": None}
    loss, report = PolicyLoss(rejection=options, **rest)(tokens(logits, data), data)
    mask, cu_seqlens = predicts_counted(data), data["cu_seqlens"]
    old, sampler = (next_token(data[key], cu_seqlens) for key in ("old_logprobs", "logprobs"))
    kept = rejection_mask(old, sampler, mask, cu_seqlens=cu_seqlens, **options)
    assert 0 < kept.sum() < mask.sum()
    assert report["rejected"].item() == pytest.approx(1 - kept.sum().item() / mask.sum().item())
    # the loss of the kept tokens alone, averaged over them, times their share of all tokens
    alone = {**data, "loss_mask": previous_token(kept, cu_seqlens)}
    expected, _ = PolicyLoss(**rest)(tokens(logits, alone), alone)
    torch.testing.assert_close(loss, expected * kept.sum() / mask.sum())


def test_negative_tokens_of_sequences_that_the_policy_has_left_keep_their_kl_alone():
    logits, data = pack([5, 9, 4, 6])
    data["logprobs"] = OwnLogprobs()(tokens(logits.detach(), data), data)
    data["logprobs"][5:14] += 0.5  # the second sequence was more likely
    data["ref_logprobs"] = data["logprobs"] - 0.1
    plain = PolicyLoss(kl_coef=0.2, tis_coef=None)
    loss, report = dataclasses.replace(plain, off_policy_threshold=0.4)(tokens(logits, data), data)
    gone = torch.zeros(24, dtype=torch.bool)
    gone[5:14] = True
    gone &= (data["advantages"] < 0) & data["loss_mask"].bool()
    assert gone.any()
    without = {**data, "advantages": torch.where(gone, 0.0, data["advantages"])}
    torch.testing.assert_close(loss, plain(tokens(logits, without), without)[0])
    assert report["off_policy_dropped"].total == gone.sum()


def test_a_selection_leaves_rejected_tokens_out():
    logits, data = pack([5, 9, 4, 6])
    own = OwnLogprobs()(tokens(logits.detach(), data), data)
    loss = PolicyLoss(policy_loss="kl_cov", options={"share": 0.5})
    chosen = loss.select(data, own)
    half = (own - data["logprobs"])[chosen & data["loss_mask"].bool()].square().median().item() / 2
    rejection = {"estimator": "k2", "scope": "token", "upper": half}
    kept = rejection_mask(own, data["logprobs"], data["loss_mask"], cu_seqlens=data["cu_seqlens"], **rejection)
    padded = {key: value[None] for key, value in data.items() if key != "cu_seqlens"}
    selected = dataclasses.replace(loss, rejection=rejection).select(padded, own[None])[0]
    assert selected.any()
    assert not (selected & ~kept).any()
    assert (chosen & ~kept).any()


@pytest.mark.parametrize(
    ("rejection", "message"),
    [
        ({"uper": 1.0}, "rejection has no option 'uper'; did you mean 'upper'"),
        ({"scope": "token"}, "missing a required .*'upper'"),
        ({"upper": "x"}, "upper='x'; expected a number"),
        ({"upper": 1.0, "estimator": "k4"}, "expected one of k1, k2, k3"),
        ({"upper": 1.0, "cu_seqlens": None}, "has no option 'cu_seqlens'"),
    ],
)
def test_a_rejection_that_cannot_work_is_refused_before_training(rejection, message):
    with pytest.raises((ConfigError, UnknownOptionError), match=message):
        PolicyLoss(rejection=rejection)
    with pytest.raises(ConfigError, match=message):
        ActorOptions(model_name="m", rejection=rejection)


@pytest.mark.parametrize("changes", [{"divergence": "js"}, {"divergence": "forward_kl"}, {"tail_weight": 0.3}])
def test_divergences_and_tail_weights_of_pairs_are_those_of_the_formulas(changes):
    logits, data = pack([7, 5, 4, 9])
    data["ref_logprobs"], data["is_chosen"] = data["logprobs"], torch.tensor([1, 0, 1, 0])
    own = OwnLogprobs()(tokens(logits, data), data)
    weight, sums = changes.get("tail_weight", 1.0), []
    for row, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        (start, end), shared = data["cu_seqlens"][row : row + 2].tolist(), [5, 3, 2, 7][other]
        ratio = (own - data["ref_logprobs"])[start + 2 : end]
        sums.append(ratio[:shared].sum() + weight * ratio[shared:].sum())
    reward = {
        "js": lambda x: math.log(2) + torch.nn.functional.logsigmoid(x),
        "forward_kl": lambda x: 1 - torch.exp(-x),
    }.get(changes.get("divergence"), lambda x: x)
    margins = torch.stack([reward(chosen) - reward(rejected) for chosen, rejected in (sums[:2], sums[2:])])
    expected = -torch.nn.functional.logsigmoid(0.3 * margins).mean()
    loss, _ = DpoLoss(beta=0.3, preference_loss=PreferenceLossOptions(**changes))(tokens(logits, data), data)
    torch.testing.assert_close(loss, expected)
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(expected, logits)[0])
    assert loss.item() != pytest.approx(DpoLoss(beta=0.3)(tokens(logits, data), data)[0].item())


def of_rows(logits, data):
    """Sums and numbers of the learnt log-probabilities of each row."""
    own = OwnLogprobs()(tokens(logits, data), data)
    ends = data["cu_seqlens"].tolist()
    learnt = [own[start + 2 : end] for start, end in itertools.pairwise(ends)]
    return torch.stack([row.sum() for row in learnt]), torch.tensor([len(row) for row in learnt])


def test_without_a_reference_pairs_are_compared_by_their_own_logprobs_and_chosen_answers_are_imitated():
    logits, data = pack([7, 5, 4, 9])
    data["is_chosen"] = torch.tensor([1, 0, 1, 0])
    (sums, lengths), logsigmoid = of_rows(logits, data), torch.nn.functional.logsigmoid
    nll = -(sums / lengths)[::2].mean()
    plain = DpoLoss(beta=0.3, preference_loss=PreferenceLossOptions(reference_free=True, nll_weight=0.7))
    loss, report = plain(tokens(logits, data), data)
    torch.testing.assert_close(loss, 0.7 * nll - logsigmoid(0.3 * (sums[::2] - sums[1::2])).mean())
    torch.testing.assert_close(report["nll"], nll.detach())
    options = PreferenceLossOptions(name="simpo", reference_free=True, length_normalised=True)
    loss, report = DpoLoss(beta=2.0, preference_loss=options)(tokens(logits, data), data)
    margins = 2.0 * (sums / lengths)[::2] - 2.0 * (sums / lengths)[1::2]
    torch.testing.assert_close(loss, -logsigmoid(margins - 1.0).mean())
    torch.testing.assert_close(report["margin"], margins.detach().mean(), msg="rewards are of means, as the loss")


def test_kto_weighs_answers_by_their_label_and_measures_from_the_reference_point():
    logits, data = pack([7, 5, 4])
    data |= {"is_desirable": torch.tensor([1, 0, 1]), "reference_point": torch.full((3,), 0.4)}
    data["ref_logprobs"] = -torch.rand(16, dtype=torch.float64)
    ratios = of_rows(logits, data)[0] - torch.stack(
        [data["ref_logprobs"][a + 2 : b].sum() for a, b in ((0, 7), (7, 12), (12, 16))]
    )
    loss = KtoLoss(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    found, report = loss(tokens(logits, data), data)
    desirable, undesirable = 1 - torch.sigmoid(0.3 * (ratios - 0.4)), 1 - torch.sigmoid(0.3 * (0.4 - ratios))
    torch.testing.assert_close(found, (1.5 * desirable[0] + 0.5 * undesirable[1] + 1.5 * desirable[2]) / 3)
    assert loss.weight(data) == 3
    assert report["desirable_rewards"].item() == pytest.approx(0.3 * (ratios[0] + ratios[2]).item() / 2)
    assert report["undesirable_rewards"].item() == pytest.approx(0.3 * ratios[1].item())


def test_centring_adds_the_squared_sum_of_a_pairs_scores():
    data = {"cu_seqlens": torch.tensor([0, 2, 4]), "is_chosen": torch.tensor([1, 0])}
    scores = torch.tensor([9.0, 1.0, 9.0, 2.0])
    plain, _ = RewardModelLoss()(scores, data)
    centred, _ = RewardModelLoss(center_coefficient=0.1)(scores, data)
    assert (centred - plain).item() == pytest.approx(0.1 * 3.0**2)
