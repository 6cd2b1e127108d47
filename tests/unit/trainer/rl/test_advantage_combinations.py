"""Every combination of the options from rewards to the gradient, against formulas written out in plain Python floats.

Nothing of the library takes part in the expected numbers, which go trajectory by trajectory and token by token.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
import torch
from tensordict import TensorDict

from rlite.algorithms import TokenLogprobs
from rlite.trainer.rl.objective import PolicyLoss, compute_advantages
from rlite.trainer.rl.options import AdvantageOptions, KlOptions

GAMMA, LAMBDA, COEF, WIDTH = 0.9, 0.8, 0.3, 8
# (group, rows): the mask of each row, whose first token is never an action; the fourth trajectory has no action at all
TRAJECTORIES = [
    (7, ["011"]),
    (7, ["0110", "00101"]),
    (2, ["01"]),
    (2, ["000"]),
    (2, ["0100", "0111101"]),
    (5, ["011011"]),
]
NAMED = [
    ("dr_grpo", {}),
    ("grpo", {}),
    ("rloo", {"singleton": "raw"}),
    ("gpg", {}),
    ("opo", {}),
    ("pass_at_k", {}),
    ("normalized", {"mean": "batch", "std": "group", "std_about": "own_mean", "unbiased": False}),
]
SWITCHED = [
    (name, {"norm_var": norm_var, "global_norm": global_norm})
    for name in ("reinforce", "gae")
    for norm_var, global_norm in itertools.product((False, True), repeat=2)
]
ESTIMATORS = [(name, {"options": options}) for name, options in NAMED] + SWITCHED + [("reinforce_pp", {})]
KL = [
    (None, "k1"),
    *itertools.product(("reward", "advantage"), ("k1", "abs", "k2", "k3")),
    *itertools.product(("loss",), ("abs", "k2", "k3")),
]


# -- the batch, as lists and as tensors ------------------------------------------------------------------------------


class Token:
    """An action token with what is known of it; `row` and `column` say where it is in the batch."""

    def __init__(self, row, column, draw):
        self.row, self.column = row, column
        self.reward, self.value = draw.uniform(-1, 1), draw.uniform(-1, 1)
        self.old, self.ref, self.behaviour, self.new = (-draw.uniform(0.1, 2) for _ in range(4))


def draw_batch(seed=0):
    """Each trajectory's (group, action tokens, reward if it has none), and the same as a batch."""
    draw, trajectories, masks, index = random.Random(seed), [], [], []
    for group, rows in TRAJECTORIES:
        actions = [
            Token(len(masks) + i, j, draw)
            for i, row in enumerate(rows)
            for j, action in enumerate(row)
            if action == "1"
        ]
        trajectories.append((group, actions, draw.uniform(-1, 1)))
        masks += rows
        index += range(len(rows))
    data = {
        key: torch.zeros(len(masks), WIDTH, dtype=torch.float64)
        for key in ("token_rewards", "values", "old_logprobs", "ref_logprobs", "logprobs", "new")
    }
    for _, actions, _ in trajectories:
        for token in actions:
            cells = (token.reward, token.value, token.old, token.ref, token.behaviour, token.new)
            for key, value in zip(data, cells, strict=True):
                data[key][token.row, token.column] = value
    counts = [len(rows) for _, rows in TRAJECTORIES]
    groups = [group for (group, _), count in zip(TRAJECTORIES, counts, strict=True) for _ in range(count)]
    lonely = next(i for i, (_, actions, _) in enumerate(trajectories) if not actions)
    data["token_rewards"][sum(counts[:lonely]), 1] = trajectories[lonely][2]
    shape = [len(mask) for mask in masks]
    data["attention_mask"] = torch.tensor([[int(j < n) for j in range(WIDTH)] for n in shape])
    data["loss_mask"] = torch.tensor([[int(c) for c in mask.ljust(WIDTH, "0")] for mask in masks])
    data["group_ids"], data["sequence_index"] = torch.tensor(groups), torch.tensor(index)
    return trajectories, TensorDict(data, batch_size=[len(masks)])


# -- the formulas ----------------------------------------------------------------------------------------------------


def estimate(kind, log_ratio):
    return {
        "k1": log_ratio,
        "abs": abs(log_ratio),
        "k2": log_ratio**2 / 2,
        "k3": math.exp(-log_ratio) - 1 + log_ratio,
    }[kind]


def kl_slope(kind, log_ratio):
    return {"abs": math.copysign(1, log_ratio), "k2": log_ratio, "k3": 1 - math.exp(-log_ratio)}[kind]


def deviation(distances, is_unbiased=True):
    return math.sqrt(sum(d * d for d in distances) / max(len(distances) - is_unbiased, 1))


def over_groups(groups, formula, *columns):
    """`formula` of each group's entries, put back in the order of the batch."""
    result = [0.0] * len(groups)
    for group in set(groups):
        own = [i for i, other in enumerate(groups) if other == group]
        for i, value in zip(own, formula(*([column[i] for i in own] for column in columns)), strict=True):
            result[i] = value
    return result


def centred(rewards):
    return [r - statistics.fmean(rewards) for r in rewards]


def scaled(rewards):
    distances = centred(rewards)
    return [d / (deviation(distances) + 1e-6) for d in distances]


def others(rewards):
    n = len(rewards)
    return [r - (sum(rewards) - r) / (n - 1) for r in rewards] if n > 1 else rewards


def length_weighted(rewards, lengths):
    baseline = sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


def best_alone(rewards):
    first, *rest = sorted(rewards, reverse=True)
    return [r - rest[0] if rest and r == first and rest[0] < first else 0.0 for r in rewards]


def outcome_advantages(estimator, adv, rewards, lengths, groups):
    batch = [0] * len(groups)
    if estimator == "reinforce":
        return over_groups(batch if adv["global_norm"] else groups, scaled if adv["norm_var"] else centred, rewards)
    if estimator == "gpg":
        share = len(rewards) / sum(r != 0 for r in rewards)
        return [share * a for a in over_groups(groups, centred, rewards)]
    if estimator == "opo":
        return over_groups(groups, length_weighted, rewards, lengths)
    if estimator == "normalized":
        deviations = over_groups(groups, lambda rs: [deviation(centred(rs), False)] * len(rs), rewards)
        return [a / (d + 1e-6) for a, d in zip(centred(rewards), deviations, strict=True)]
    formula = {"dr_grpo": centred, "grpo": scaled, "rloo": others, "pass_at_k": best_alone}[estimator]
    return over_groups(groups, formula, rewards)


def gae_advantages(adv, trajectories, rewards):
    """By token, in the order of the trajectories; backwards through each."""
    result = []
    for (_, actions, _), own in zip(trajectories, rewards, strict=True):
        following, value, reversed_advantages = 0.0, 0.0, []
        for token, reward in zip(reversed(actions), reversed(own), strict=True):
            following = reward + GAMMA * value - token.value + GAMMA * LAMBDA * following
            value = token.value
            reversed_advantages.append(following)
        result += reversed(reversed_advantages)
    mean, std = statistics.fmean(result), deviation(centred(result))
    result = [a - mean for a in result] if adv["global_norm"] else result
    return [a / math.sqrt(std**2 + 1e-8) for a in result] if adv["norm_var"] else result


def whitened(values):
    return [d / math.sqrt(deviation(centred(values)) ** 2 + 1e-8) for d in centred(values)]


def returns(own):
    return [sum(GAMMA**i * reward for i, reward in enumerate(own[start:])) for start in range(len(own))]


def expected_advantages(estimator, adv, kl, is_single, trajectories):
    kind, kl_estimator = kl
    penalty = [[COEF * estimate(kl_estimator, t.old - t.ref) for t in actions] for _, actions, _ in trajectories]
    rewards = [
        [t.reward - (p if kind == "reward" else 0.0) for t, p in zip(actions, own, strict=True)]
        for (_, actions, _), own in zip(trajectories, penalty, strict=True)
    ]
    if estimator == "gae":
        flat = gae_advantages(adv, trajectories, rewards)
    elif estimator == "reinforce_pp":
        flat = whitened([value for own in rewards for value in returns(own)])
    else:
        outcomes = [
            sum(GAMMA**i * r for i, r in enumerate(own)) if own else alone
            for own, (_, _, alone) in zip(rewards, trajectories, strict=True)
        ]
        lengths = [len(own) for own in rewards]
        groups = [0 if is_single else group for group, _, _ in trajectories]
        each = outcome_advantages(estimator, adv, outcomes, lengths, groups)
        flat = [a for a, own in zip(each, rewards, strict=True) for _ in own]
    costs = [p if kind == "advantage" else 0.0 for own in penalty for p in own]
    return [a - c for a, c in zip(flat, costs, strict=True)]


def expected_loss(tokens, advantages, kl, avg_level):
    """Loss and its derivative by each action token's log-probability: PPO's clip, truncated importance weights, KL."""
    kind, kl_estimator = kl
    lengths = {row: sum(t.row == row for t in tokens) for row in {t.row for t in tokens}}
    loss, slopes = 0.0, []
    for token, advantage in zip(tokens, advantages, strict=True):
        share = {
            "token": 1 / len(tokens),
            "sequence": 1 / (lengths[token.row] * len(lengths)),
            "constant": 1 / (WIDTH * len(lengths)),
        }[avg_level]
        ratio, weight = math.exp(token.new - token.old), min(math.exp(token.old - token.behaviour), 2.0)
        near = min(max(ratio, 0.8), 1.3)
        value, slope = -weight * min(ratio * advantage, near * advantage), 0.0
        if ratio * advantage <= near * advantage:
            slope = -weight * ratio * advantage
        if kind == "loss":
            value += COEF * estimate(kl_estimator, token.new - token.ref)
            slope += COEF * kl_slope(kl_estimator, token.new - token.ref)
        loss += share * value
        slopes.append(share * slope)
    return loss, slopes


# -- what the library makes of it ------------------------------------------------------------------------------------


def found_loss(batch, kl, avg_level):
    """Loss and derivatives on a pack of the batch's rows, in which a position predicts the token after it."""
    real = batch["attention_mask"].bool()
    data = {key: batch[key][real] for key in ("loss_mask", "old_logprobs", "ref_logprobs", "logprobs", "advantages")}
    data["cu_seqlens"] = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int()
    own = batch["new"][real].requires_grad_()
    kind, kl_estimator = kl
    loss = PolicyLoss(
        clip_high=0.3,
        avg_level=avg_level,
        max_new_tokens=WIDTH,
        kl_coef=COEF if kind == "loss" else 0.0,
        kl_estimator=kl_estimator if kind == "loss" else "k2",
    )
    value, _ = loss(TokenLogprobs(own.roll(-1), torch.zeros_like(own)), data)
    (slopes,) = torch.autograd.grad(value, own)
    return value.item(), slopes[data["loss_mask"].bool()].tolist()


@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize(("estimator", "adv"), ESTIMATORS)
def test_advantages_and_loss_are_those_of_the_formulas(estimator, adv, is_single):
    trajectories, batch = draw_batch()
    tokens = [token for _, actions, _ in trajectories for token in actions]
    for kl in KL:
        kind, kl_estimator = kl
        options = AdvantageOptions(estimator=estimator, gamma=GAMMA, lamda=LAMBDA, **adv)
        price = KlOptions(type=kind, coef=COEF, reward_estimator=kl_estimator)
        data = compute_advantages(batch, options, price, is_single)
        found = data["advantages"].double()
        expected = expected_advantages(estimator, adv.get("options", adv), kl, is_single, trajectories)
        assert (found[data["loss_mask"] == 0] == 0).all()
        assert [found[t.row, t.column].item() for t in tokens] == pytest.approx(expected, rel=1e-5, abs=1e-5), kl
        for avg_level in ("token", "sequence", "constant"):
            loss, slopes = expected_loss(tokens, expected, kl, avg_level)
            data["advantages"] = found
            found_value, found_slopes = found_loss(data, kl, avg_level)
            assert found_value == pytest.approx(loss, rel=1e-5, abs=1e-5), (kl, avg_level)
            assert found_slopes == pytest.approx(slopes, rel=1e-5, abs=1e-5), (kl, avg_level)
