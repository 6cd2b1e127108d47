"""Policy, value and preference losses of ours and of other libraries on random batches: values and gradients.

TRL's losses are methods of trainers: `trainer` is what they read of `self`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite.algorithms import (
    LossInputs,
    TokenLogprobs,
    aggregate,
    aot_loss,
    cross_entropy,
    desensitised_sums,
    interpolated_proximal,
    kl_penalty,
    kto_loss,
    kto_reference_point,
    off_policy_sequence_mask,
    policy_loss,
    preference_loss,
    reward_model_loss,
    second_moment_mask,
    sequence_log_ratio,
    value_loss,
)
from rlite.trainer.losses import DpoLoss
from rlite.trainer.supervised_options import PreferenceLossOptions
from tests.peers.batches import LENGTH, Batch, random_batch

Peer = Callable[[str], ModuleType]
CLOSE = {"rtol": 1e-7, "atol": 1e-8}  # verl adds 1e-8 to counts
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
SEEDS = range(4)


def same(theirs: Callable[..., Tensor], ours: Callable[..., Tensor], *inputs: Tensor, **close: float) -> None:
    """Assert that two scalar functions have one value and one gradient in each input."""
    results = []
    for function in (theirs, ours):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        value = function(*leaves)
        results.append((value.detach().double(), *(g.double() for g in torch.autograd.grad(value, leaves))))
    torch.testing.assert_close(results[1], results[0], **(close or CLOSE))


def advantages_of(batch: Batch, seed: int, *, per_token: bool = True) -> Tensor:
    shape = batch.mask.shape if per_token else (len(batch.mask), 1)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)
    return noise.expand(batch.mask.shape) * batch.mask


def weights_of(batch: Batch, seed: int) -> Tensor:
    noise = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(200 + seed), dtype=torch.float64)
    return noise + 0.5


VERLS = {
    # ours: verl's name, options of ours, attributes of verl's config, and the average where it allows only one
    "ppo_clip": ("vanilla", {"clip_high": 0.28, "dual_clip": 3.0}, {"clip_ratio_high": 0.28}, None),
    "gspo": ("gspo", {"clip_low": 0.1, "clip_high": 0.1}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}, None),
    "cispo": ("cispo", {"clip_low": 0.2, "clip_high": 0.2}, {}, None),
    "sapo": ("sapo", {"tau_pos": 1.3, "tau_neg": 2.1}, {"tau_pos": 1.3, "tau_neg": 2.1}, "sequence"),
    "gmpo": ("geo_mean", {"clip_low": 0.2, "clip_high": 0.3}, {"clip_ratio_high": 0.3}, "sequence"),
    "reinforce": ("gpg", {}, {}, None),
    "dro": ("dro", {"beta": 0.3}, {"policy_loss.dro_beta": 0.3}, None),
    "kl_cov": (
        "kl_cov",
        {"share": 0.1, "kl_coef": 0.7},
        {"policy_loss.kl_cov_ratio": 0.1, "policy_loss.ppo_kl_coef": 0.7},
        None,
    ),
    # fewer candidates than the quota, from which verl would draw without a seed
    "clip_cov": (
        "clip_cov",
        {"share": 0.9, "cov_low": 0.4},
        {"policy_loss.clip_cov_ratio": 0.9, "policy_loss.clip_cov_lb": 0.4},
        None,
    ),
}
AVERAGES = {"token": "token-mean", "sequence": "seq-mean-token-mean"}


def verls_loss(peer: Peer, name: str, average: str, changes: dict[str, Any]) -> Callable[..., tuple[Tensor, Any]]:
    core = peer("verl.trainer.ppo.core_algos")
    configs = peer("verl.workers.config")
    of_loss = {key.split(".")[1]: value for key, value in changes.items() if "." in key}
    of_actor = {key: value for key, value in changes.items() if "." not in key}
    config = configs.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=configs.PolicyLossConfig(loss_mode=name, **of_loss),
        **of_actor,
    )
    function = core.get_policy_loss_fn(name)
    return lambda *tensors, weights: function(*tensors, AVERAGES[average], config, weights)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("average", sorted(AVERAGES))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", [*sorted(VERLS), "dppo_tv", "dppo_kl"])
def test_policy_losses_equal_verl(peer: Peer, name: str, weighted: bool, average: str, seed: int) -> None:
    if name.startswith("dppo"):
        options = {"divergence": name[-2:], "clip_low": 0.03, "clip_high": 0.02, "ratio_cap": 1.5}
        ours_name, theirs_name, only = "dppo", name, None
        changes = {"clip_ratio_low": 0.03, "clip_ratio_high": 0.02, "clip_ratio_c": 1.5}
    else:
        ours_name, (theirs_name, options, changes, only) = name, VERLS[name]
    average = only or average
    batch = random_batch(seed, spread=0.5)
    # GMPO takes the mean advantage; any other loss takes those of tokens
    advantages = advantages_of(batch, seed)
    weights = weights_of(batch, seed) if weighted else None
    theirs = verls_loss(peer, theirs_name, average, changes)

    def ours(logprobs: Tensor) -> Tensor:
        inputs = LossInputs(logprobs, batch.old_logprobs, advantages, batch.mask, weights=weights)
        token = policy_loss(ours_name, inputs, options)
        return aggregate(token.loss, batch.mask, average)

    same(
        lambda logprobs: theirs(batch.old_logprobs, logprobs, advantages, batch.mask, weights=weights)[0],
        ours,
        batch.logprobs,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("level", "mode", "gate", "bounds"),
    [
        ("off", "mask", "ratio", (0.5, 5.0)),
        ("token", "mask", "ratio", (0.7, 1.5)),
        ("token", "clip", "ratio", (0.7, 1.5)),
        ("seq", "mask", "ratio", (0.9, 1.1)),
        ("token", "mask", "binary_kl", (0.0, 0.02)),
        ("seq", "mask", "binary_kl", (0.0, 0.02)),
        ("token", "mask", "tv", (0.0, 0.05)),
        ("seq", "mask", "tv", (0.0, 0.05)),
    ],
)
def test_gated_ppo_equals_openrlhf(
    peer: Peer, level: str, mode: str, gate: str, bounds: tuple[float, float], seed: int
) -> None:
    module = peer("openrlhf.models.loss")
    batch, advantages = random_batch(seed, spread=0.4), advantages_of(random_batch(seed), seed)
    behaviour = batch.ref_logprobs.clamp(max=-1e-3)  # a divergence is one of probabilities
    theirs = module.PolicyLoss(
        clip_eps_low=0.2,
        clip_eps_high=0.28,
        dual_clip=3.0,
        is_correction_level=level,
        is_correction_mode=mode,
        is_correction_gating=gate,
        is_correction_threshold=bounds,
    )
    options: dict[str, Any] = {"clip_high": 0.28, "dual_clip": 3.0}
    if level != "off":
        options |= {
            "metric": gate,
            "scope": {"token": "token", "seq": "sequence"}[level],
            "action": {"mask": "mask", "clip": "clamp"}[mode],
            "lower": bounds[0],
            "upper": bounds[1],
            "token_weights": True,
        }

    def ours(logprobs: Tensor) -> Tensor:
        inputs = LossInputs(logprobs, batch.old_logprobs, advantages, batch.mask, behaviour_logprobs=behaviour)
        token = policy_loss("ppo_clip" if level == "off" else "decoupled_ppo", inputs, options)
        return aggregate(token.loss, batch.mask)

    same(
        lambda logprobs: theirs(logprobs, batch.old_logprobs, advantages, batch.mask, behaviour)[0],
        ours,
        batch.logprobs,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_equals_openrlhf_and_areal(peer: Peer, seed: int) -> None:
    openrlhf, areal = peer("openrlhf.models.loss"), peer("areal.utils.functional")
    batch = random_batch(seed)
    advantages = advantages_of(batch, seed, per_token=False)
    theirs = openrlhf.PolicyLoss(clip_eps_low=0.05, clip_eps_high=0.06, policy_loss_type="gspo")

    def ours(logprobs: Tensor, average: str) -> Tensor:
        options = {"clip_low": 0.05, "clip_high": 0.06}
        token = policy_loss("gspo", LossInputs(logprobs, batch.old_logprobs, advantages, batch.mask), options)
        return aggregate(token.loss, batch.mask, average)

    same(
        lambda x: theirs(x, batch.old_logprobs, advantages, batch.mask)[0],
        lambda x: ours(x, "sequence"),
        batch.logprobs,
    )
    same(
        lambda x: areal.ppo_actor_loss_fn(
            logprobs=x,
            proximal_logprobs=batch.old_logprobs,
            old_logprobs=batch.old_logprobs,
            advantages=advantages,
            eps_clip=0.05,
            eps_clip_higher=0.06,
            loss_mask=batch.mask.bool(),
            importance_sampling_level="sequence",
        )[0],
        lambda x: ours(x, "token"),
        batch.logprobs,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("metric", "bounds", "action"),
    [
        ("ratio", (0.8, 1.3), "mask"),
        ("ratio", (0.8, 1.3), "clamp"),
        ("k1", (-0.2, 0.2), "mask"),
        ("k2", (None, 0.03), "mask"),
        ("k3", (None, 0.03), "mask"),
    ],
)
def test_packed_decoupled_ppo_equals_areal(
    peer: Peer, metric: str, bounds: tuple[float | None, float], action: str, level: str, seed: int
) -> None:
    areal = peer("areal.utils.functional")
    batch = random_batch(seed)
    rows, length = batch.mask.shape
    cu_seqlens = torch.arange(0, rows * length + 1, length)
    advantages = advantages_of(batch, seed).flatten()
    old, behaviour, mask = batch.old_logprobs.flatten(), batch.ref_logprobs.flatten(), batch.mask.flatten().bool()
    sampling = SimpleNamespace(
        level=level,
        action=action,
        metric=metric if metric == "ratio" else f"kl_{metric}",
        agg="mean",
        lower=bounds[0],
        upper=bounds[1],
    )

    def theirs(logprobs: Tensor) -> Tensor:
        return areal.ppo_actor_loss_fn(
            logprobs=logprobs,
            proximal_logprobs=old,
            old_logprobs=behaviour,
            advantages=advantages,
            eps_clip=0.2,
            loss_mask=mask,
            c_clip=3.0,
            rejection_sampling=sampling,
            cu_seqlens=cu_seqlens,
        )[0]

    def ours(logprobs: Tensor) -> Tensor:
        options = {"dual_clip": 3.0, "metric": metric, "scope": level, "action": action}
        inputs = LossInputs(logprobs, old, advantages, mask, behaviour_logprobs=behaviour, cu_seqlens=cu_seqlens)
        token = policy_loss("decoupled_ppo", inputs, {**options, "lower": bounds[0], "upper": bounds[1]})
        return aggregate(token.loss, mask, cu_seqlens=cu_seqlens)

    same(theirs, ours, batch.logprobs.flatten(), **FLOAT32)


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo_proximal_interpolation_and_second_moment_mask_equal_areal(peer: Peer, seed: int) -> None:
    areal, actor = peer("areal.utils.functional"), peer("areal.trainer.ppo.actor")
    batch, mask = random_batch(seed), random_batch(seed).mask.bool()
    advantages = advantages_of(batch, seed)
    same(
        lambda x: areal.sapo_loss_fn(x, batch.old_logprobs, advantages, 1.0, 1.05, mask)[0],
        lambda x: aggregate(policy_loss("sapo", LossInputs(x, batch.old_logprobs, advantages, mask)).loss, mask),
        batch.logprobs,
    )
    for threshold in (1e-4, 0.02, 0.05, 1.0):
        theirs = actor._apply_m2po_masking(batch.ref_logprobs, batch.old_logprobs, mask, threshold)
        ours = second_moment_mask(batch.old_logprobs - batch.ref_logprobs, mask, threshold=threshold)
        assert torch.equal(ours, theirs)
    versions = torch.randint(-1, 6, mask.shape, generator=torch.Generator().manual_seed(seed))
    theirs = actor.compute_prox_logp_approximations(batch.old_logprobs, batch.logprobs, versions, 5)
    for space, name in (("log", "loglinear"), ("linear", "linear")):
        ours = interpolated_proximal(batch.logprobs, batch.old_logprobs, versions, 5, space=space)
        torch.testing.assert_close(ours, theirs[name], **FLOAT32)


class Accelerator:
    """One process."""

    num_processes = 1
    device = torch.device("cpu")

    def gather(self, x: Any) -> Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x


def trainer(**attributes: Any) -> SimpleNamespace:
    """Return a trainer with the attributes that the losses of TRL's trainers read."""
    return SimpleNamespace(
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        **attributes,
    )


def trls_grpo(peer: Peer, batch: Batch, advantages: Tensor, inputs: dict[str, Tensor], **changes: Any) -> Any:
    """GRPOTrainer's loss as a function of the log-probabilities."""
    cls = peer("trl.trainer.grpo_trainer").GRPOTrainer
    settings = {
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
    } | {key: value for key, value in changes.items() if key not in ("delta", "use_bias_correction_kl")}
    args = SimpleNamespace(
        delta=changes.get("delta"),
        use_bias_correction_kl=changes.get("use_bias_correction_kl", False),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=2.0,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=1,
    )
    ids = torch.zeros(batch.mask.shape, dtype=torch.long)

    def loss(logprobs: Tensor) -> Tensor:
        me = trainer(
            args=args,
            top_entropy_quantile=1.0,
            use_vllm="importance_sampling_ratio" in inputs,
            vllm_importance_sampling_correction=True,
            current_gradient_accumulation_steps=1,
            _entropy_bonus_enabled=False,
            max_completion_length=LENGTH,
            get_off_policy_mask=cls.get_off_policy_mask,
            get_gamma_weights=cls.get_gamma_weights,
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
            **settings,
        )
        return cls._compute_loss(
            me,
            None,
            {
                "prompt_ids": ids,
                "prompt_mask": ids,
                "completion_ids": ids,
                "completion_mask": batch.mask,
                "advantages": advantages[:, 0],
                "old_per_token_logps": batch.old_logprobs,
                "ref_per_token_logps": batch.ref_logprobs,
                "num_items_in_batch": batch.mask.sum(),
                **inputs,
            },
        )

    return loss


GRPO_VARIANTS = {
    # TRL's settings: our loss, its options, our average
    "grpo": ({}, "ppo_clip", {"clip_high": 0.28}, "sequence"),
    "grpo_delta": ({"delta": 1.5}, "ppo_clip", {"clip_high": 0.28, "dual_clip": 1.5}, "sequence"),
    "bnpo": ({"loss_type": "bnpo"}, "ppo_clip", {"clip_high": 0.28}, "token"),
    "dapo": ({"loss_type": "dapo"}, "ppo_clip", {"clip_high": 0.28}, "token"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, "ppo_clip", {"clip_high": 0.28}, "constant"),
    "gspo": (
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
        "gspo",
        {"clip_low": 0.05, "clip_high": 0.06},
        "sequence",
    ),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        "gspo",
        {"clip_low": 0.2, "clip_high": 0.28},
        "sum",
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, "cispo", {"clip_high": 0.3}, "token"),
    "sapo": ({"loss_type": "sapo"}, "sapo", {"tau_neg": 2.0}, "sequence"),
    "vespo": ({"loss_type": "vespo"}, "vespo", {}, "token"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kl", ["none", "k3", "corrected"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("variant", sorted(GRPO_VARIANTS))
def test_grpo_and_its_variants_equal_trl(peer: Peer, variant: str, weighted: bool, kl: str, seed: int) -> None:
    settings, name, options, average = GRPO_VARIANTS[variant]
    batch = random_batch(seed)
    advantages = torch.randn(len(batch.mask), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    advantages = advantages.expand(batch.mask.shape)
    # at the tokens that do not count TRL's VESPO takes the weights in, ours does not
    weights = torch.where(batch.mask.bool(), weights_of(batch, seed), 1.0) if weighted else None
    if weights is not None and name == "gspo":  # a token's weight is in its gradient (verl's too) or in all (TRL's)
        weights = weights[:, :1].expand(weights.shape)
    inputs = {"importance_sampling_ratio": weights} if weights is not None else {}
    if kl != "none":
        settings = {**settings, "beta": 0.04, "use_bias_correction_kl": kl == "corrected"}

    def ours(logprobs: Tensor) -> Tensor:
        inputs = LossInputs(logprobs, batch.old_logprobs, advantages, batch.mask, weights=weights)
        loss = policy_loss(name, inputs, options).loss
        if kl != "none":
            k3 = kl_penalty(logprobs, batch.ref_logprobs, "k3", max_log_ratio=None, max_value=None)
            log_ratio = logprobs - batch.old_logprobs
            if name == "gspo":
                log_ratio = sequence_log_ratio(log_ratio, batch.mask)
            loss = loss + 0.04 * (k3 * log_ratio.exp() if kl == "corrected" else k3)
        if average in ("constant", "sum"):
            return aggregate(loss, batch.mask, "constant", length=LENGTH if average == "constant" else 1)
        return aggregate(loss, batch.mask, average)

    same(trls_grpo(peer, batch, advantages, inputs, **settings), ours, batch.logprobs)


@pytest.mark.parametrize("seed", SEEDS)
def test_off_policy_sequence_mask_equals_trl(peer: Peer, seed: int) -> None:
    batch = random_batch(seed, spread=0.2)
    advantages = torch.randn(len(batch.mask), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    advantages = advantages.expand(batch.mask.shape)
    theirs = trls_grpo(
        peer, batch, advantages, {"sampling_per_token_logps": batch.ref_logprobs}, off_policy_mask_threshold=0.03
    )

    def ours(logprobs: Tensor) -> Tensor:
        inputs = LossInputs(logprobs, batch.old_logprobs, advantages, batch.mask)
        loss = policy_loss("ppo_clip", inputs, {"clip_high": 0.28}).loss
        kept = off_policy_sequence_mask(logprobs, batch.ref_logprobs, advantages, batch.mask, threshold=0.03)
        return aggregate(loss * kept, batch.mask, "sequence")

    same(theirs, ours, batch.logprobs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [0.2, 0.6])
def test_value_losses_equal_verl_openrlhf_and_areal(peer: Peer, clip: float, seed: int) -> None:
    verl, openrlhf = peer("verl.trainer.ppo.core_algos"), peer("openrlhf.models.loss")
    areal = peer("areal.utils.functional")
    batch = random_batch(seed)
    returns, old = batch.logprobs, batch.values + 0.5 * batch.ref_logprobs

    def ours(values: Tensor) -> Tensor:
        return aggregate(value_loss(values, returns, old, clip=clip).loss, batch.mask)

    same(lambda v: verl.compute_value_loss(v, returns, old, batch.mask, clip)[0], ours, batch.values)
    same(lambda v: openrlhf.ValueLoss(clip_eps=clip)(v, old, returns, batch.mask), ours, batch.values)
    same(
        lambda v: areal.ppo_critic_loss_fn(v.float(), old.float(), returns.float(), clip, batch.mask.bool())[0],
        ours,
        batch.values,
        **FLOAT32,
    )


PREFERENCES = {
    # TRL's name: ours and its options
    "sigmoid": ("sigmoid", {}),
    "hinge": ("hinge", {}),
    "ipo": ("ipo", {}),
    "sigmoid_norm": ("sigmoid", {}),
    "robust": ("robust", {"label_smoothing": 0.2}),
    "exo_pair": ("exo", {"label_smoothing": 0.2}),
    "nca_pair": ("nca", {}),
    "bco_pair": ("bco", {}),
    "sppo_hard": ("sppo", {}),
    "apo_zero": ("apo_zero", {}),
    "apo_down": ("apo_down", {}),
    "discopop": ("discopop", {"tau": 0.05}),
}
BY_LENGTH = ("ipo", "sigmoid_norm")


def trls_dpo(peer: Peer, mask: Tensor, reference: Tensor, **changes: Any) -> Callable[[Tensor], Tensor]:
    """DPOTrainer's loss as a function of the tokens' log-probabilities, chosen rows before rejected ones."""
    cls = peer("trl.trainer.dpo_trainer").DPOTrainer
    completion_mask = torch.nn.functional.pad(mask, (1, 0))

    def outputs(logprobs: Tensor) -> SimpleNamespace:
        zeros = torch.zeros_like(logprobs)
        return SimpleNamespace(log_probs=logprobs * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    settings = {"loss_types": ["sigmoid"], "loss_weights": [1.0], "f_divergence_type": "reverse_kl", "ld_alpha": None}

    def loss(logprobs: Tensor) -> Tensor:
        me = trainer(
            args=SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
            beta=0.3,
            label_smoothing=0.2,
            use_weighting=False,
            precompute_ref_logps=False,
            ref_model=lambda **_: outputs(reference),
            **(settings | changes),
        )
        me.model.gradient_checkpointing_disable = me.model.gradient_checkpointing_enable = lambda *_: None
        me.model.is_gradient_checkpointing = False
        me.model._modules = {}  # accelerate looks for compiled ones, if anything has imported torch._dynamo
        inputs = {
            "input_ids": torch.zeros(completion_mask.shape, dtype=torch.long),
            "attention_mask": torch.ones(completion_mask.shape),
            "completion_mask": completion_mask.long(),
        }
        return cls._compute_loss(me, lambda **_: outputs(logprobs), inputs, False)

    return loss


def halves(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Chosen and rejected rows."""
    return tuple(half for x in tensors for half in x.chunk(2))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", sorted(PREFERENCES))
def test_preference_losses_equal_trl(peer: Peer, name: str, seed: int) -> None:
    batch = random_batch(seed, has_holes=False)
    ours_name, options = PREFERENCES[name]
    chosen_lengths, rejected_lengths = halves(batch.mask.sum(-1))
    lengths = {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths} if name in BY_LENGTH else {}

    def ours(logprobs: Tensor) -> Tensor:
        sums = halves((logprobs * batch.mask).sum(-1), (batch.ref_logprobs * batch.mask).sum(-1))
        return preference_loss(*sums, loss=ours_name, beta=0.3, options=options, **lengths).loss.mean()

    close = {"rtol": 1e-6, "atol": 1e-7} if name == "exo_pair" else {}  # TRL's constants are float32
    same(trls_dpo(peer, batch.mask, batch.ref_logprobs, loss_types=[name]), ours, batch.logprobs, **close)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"f_divergence_type": "forward_kl"},
        {"f_divergence_type": "js_divergence"},
        {"ld_alpha": 0.4},
        {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    ],
    ids=str,
)
def test_divergences_mixtures_and_length_desensitisation_equal_trl(
    peer: Peer, changes: dict[str, Any], seed: int
) -> None:
    batch = random_batch(seed, has_holes=False)
    mask, lengths = batch.mask, batch.mask.sum(-1).long()
    shared = torch.minimum(*lengths.chunk(2)).repeat(2)
    divergence = {"forward_kl": "forward_kl", "js_divergence": "js"}.get(changes.get("f_divergence_type"), "reverse_kl")
    terms = {"sigmoid": 0.8, "bco": 0.2} if "loss_types" in changes else {"sigmoid": 1.0}

    def ours(logprobs: Tensor) -> Tensor:
        sums = [
            desensitised_sums(x, mask, shared, tail_weight=changes.get("ld_alpha", 1.0))
            for x in (logprobs, batch.ref_logprobs)
        ]
        loss = preference_loss(*halves(*sums), loss=terms, beta=0.3, divergence=divergence).loss.mean()
        if "loss_types" in changes:
            loss = loss + aggregate(cross_entropy(logprobs.chunk(2)[0]).loss, mask.chunk(2)[0])
        return loss

    same(trls_dpo(peer, mask, batch.ref_logprobs, **changes), ours, batch.logprobs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_aot_equals_trl(peer: Peer, name: str, seed: int) -> None:
    batch = random_batch(seed, has_holes=False)

    def ours(logprobs: Tensor) -> Tensor:
        sums = halves((logprobs * batch.mask).sum(-1), (batch.ref_logprobs * batch.mask).sum(-1))
        return aot_loss(*sums, beta=0.3, label_smoothing=0.2, paired=name == "aot").loss.mean()

    same(trls_dpo(peer, batch.mask, batch.ref_logprobs, loss_types=[name]), ours, batch.logprobs)


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_with_label_smoothing_and_ipo_equal_openrlhf(peer: Peer, seed: int) -> None:
    module, batch = peer("openrlhf.models.loss"), random_batch(seed)
    sums = halves((batch.logprobs * batch.mask).sum(-1), (batch.ref_logprobs * batch.mask).sum(-1))
    for name, settings, options in (
        ("sigmoid", {"label_smoothing": 0.15}, {"label_smoothing": 0.15}),
        ("ipo", {"ipo": True}, {}),
    ):
        theirs = module.DPOLoss(0.3, **settings)
        same(
            lambda c, r, theirs=theirs: theirs(c, r, *sums[2:])[0],
            lambda c, r, name=name, options=options: preference_loss(
                c, r, *sums[2:], loss=name, beta=0.3, options=options
            ).loss.mean(),
            *sums[:2],
        )


PRESETS = {
    # TRL's trainer, what its loss reads of itself, our loss with its options, and the weight of the likelihood
    "orpo": ("orpo.orpo_trainer", "ORPOTrainer", {}, "orpo", {}, True, 1.0),
    "simpo": (
        "cpo.cpo_trainer",
        "CPOTrainer",
        {"loss_type": "simpo", "cpo_alpha": 0.0},
        "simpo",
        {"gamma": 0.5},
        True,
        0.0,
    ),
    "cpo": ("cpo.cpo_trainer", "CPOTrainer", {"loss_type": "sigmoid", "cpo_alpha": 0.7}, "sigmoid", {}, False, 0.7),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PRESETS)
def test_losses_without_a_reference_equal_trl(peer: Peer, name: str, seed: int) -> None:
    module, trainers, settings, ours_name, options, is_of_means, nll_weight = PRESETS[name]
    cls = getattr(peer(f"trl.experimental.{module}"), trainers)
    batch = random_batch(seed, has_holes=False)
    pairs = list(zip(*batch.mask.long().chunk(2), strict=True))

    def theirs(logprobs: Tensor) -> Tensor:
        """The mean over pairs of the loss of one pair, as TRL's mean likelihood is over the tokens of a microbatch."""
        losses = []
        for rows, masks in zip(zip(*logprobs.chunk(2), strict=True), pairs, strict=True):
            sums = [(row * mask).sum() for row, mask in zip(rows, masks, strict=True)]
            means = [total / mask.sum() for total, mask in zip(sums, masks, strict=True)]
            compared = [x[None] for x in (means if is_of_means else sums)]
            me = trainer(beta=0.3, label_smoothing=0.0, simpo_gamma=0.5, alpha=0.0, **settings)
            me.cpo_loss = lambda *logps, me=me: cls.cpo_loss(me, *logps)
            me.odds_ratio_loss = lambda *logps, me=me: cls.odds_ratio_loss(me, *logps)
            outputs = (*compared, torch.zeros(1), torch.zeros(1), -means[0])
            me.concatenated_forward = lambda *_, outputs=outputs: outputs
            losses.append(cls.get_batch_loss_metrics(me, None, {})[0])
        return torch.stack(losses).mean()

    def ours(logprobs: Tensor) -> Tensor:
        rows, length = batch.mask.shape
        order = torch.arange(rows).view(2, -1).T.flatten()  # a pair's rows are neighbours
        packed = torch.nn.functional.pad(logprobs, (0, 1))[order].flatten()  # positions that predict the next token
        data = {
            "cu_seqlens": torch.arange(0, rows * (length + 1) + 1, length + 1, dtype=torch.int32),
            "loss_mask": torch.nn.functional.pad(batch.mask, (1, 0))[order].flatten(),
            "is_chosen": torch.tensor([1, 0] * (rows // 2)),
        }
        chosen = PreferenceLossOptions(
            name=ours_name, options=options, reference_free=True, length_normalised=is_of_means, nll_weight=nll_weight
        )
        return DpoLoss(beta=0.3, preference_loss=chosen)(TokenLogprobs(packed, packed), data)[0]

    logprobs = -batch.logprobs.abs() - 0.01
    same(theirs, ours, logprobs, **(FLOAT32 if name == "orpo" else CLOSE))  # TRL's odds are in float32


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto_equals_trl(peer: Peer, loss_type: str, seed: int) -> None:
    cls = peer("trl.trainer.kto_trainer").KTOTrainer
    batch = random_batch(seed, has_holes=False)
    mask, labels = batch.mask, torch.arange(len(batch.mask)) % 3 == 0
    kl_logps, kl_reference = batch.values.sum(-1), batch.values.sum(-1) - 0.3 * (-1) ** seed
    is_kto = loss_type == "kto"

    def theirs(logprobs: Tensor) -> Tensor:
        zeros = torch.zeros_like(logprobs)
        me = trainer(
            beta=0.3,
            loss_type=loss_type,
            calculate_KL=is_kto,
            desirable_weight=1.3,
            undesirable_weight=0.7,
            precompute_ref_logps=True,
            _compute_kl_logps=lambda *_: kl_logps,
        )
        inputs = {
            "label": labels,
            "input_ids": torch.zeros(len(mask), LENGTH + 1, dtype=torch.long),
            "attention_mask": torch.ones(len(mask), LENGTH + 1),
            "completion_mask": torch.nn.functional.pad(mask, (1, 0)).long(),
            "ref_logps": (batch.ref_logprobs * mask).sum(-1),
            "ref_KL_logps": kl_reference,
        }
        outputs = SimpleNamespace(log_probs=logprobs * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
        return cls._compute_loss(me, lambda **_: outputs, inputs, False)

    def ours(logprobs: Tensor) -> Tensor:
        sums = [(x * mask).sum(-1) for x in (logprobs, batch.ref_logprobs)]
        kl = kto_reference_point(kl_logps, kl_reference) if is_kto else 0.0
        return kto_loss(*sums, labels, kl=kl, beta=0.3, desirable_weight=1.3, undesirable_weight=0.7).loss.mean()

    same(theirs, ours, batch.logprobs)


@pytest.mark.parametrize("seed", SEEDS)
def test_reward_model_losses_equal_openrlhf_and_trl(peer: Peer, seed: int) -> None:
    openrlhf = peer("openrlhf.models.loss").PairWiseLoss()
    cls = peer("trl.trainer.reward_trainer").RewardTrainer
    scores = random_batch(seed).values
    chosen, rejected, margin = scores[:, 0], scores[:, 1], scores[:, 2].abs()
    same(openrlhf, lambda c, r: reward_model_loss(c, r).loss.mean(), chosen, rejected)
    same(
        lambda c, r: openrlhf(c, r, margin),
        lambda c, r: reward_model_loss(c, r, margin=margin).loss.mean(),
        chosen,
        rejected,
    )
    me = trainer(args=SimpleNamespace(center_rewards_coefficient=0.01))

    def theirs(c: Tensor, r: Tensor) -> Tensor:
        logits = torch.cat([c, r])[:, None]
        inputs = {"margin": margin, "attention_mask": torch.ones(1, 1)}
        return cls.compute_loss(me, lambda **_: SimpleNamespace(logits=logits), inputs)

    same(
        theirs,
        lambda c, r: reward_model_loss(c, r, margin=margin, center_coefficient=0.01).loss.mean(),
        chosen,
        rejected,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("average", ["token", "sequence"])
def test_supervised_loss_equals_openrlhf(peer: Peer, average: str, seed: int) -> None:
    theirs, batch = peer("openrlhf.models.loss").SFTLoss(token_level_loss=average == "token"), random_batch(seed)
    same(
        lambda x: theirs(x, batch.mask),
        lambda x: aggregate(cross_entropy(x).loss, batch.mask, average),
        batch.logprobs,
    )
