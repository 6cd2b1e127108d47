"""Prose of a reinforcement-learning run: the plan of a step for the console."""

from __future__ import annotations

from collections.abc import Mapping

import rlite
from rlite.data.rows import Rows
from rlite.evaluation.sets import EvaluationSet
from rlite.trainer.rl.config import PpoConfig, SamplingOptions
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.held_out import HeldOutPromptOptions
from rlite.trainer.rl.lengths import Context


def batch_plan(
    options: PpoConfig, engines: Engines, context: Context, rows: Rows, sets: Mapping[str, EvaluationSet]
) -> dict[str, str]:
    """Return how a step's work is divided, in words and numbers by topic.

    Args:
        options: the run's config.
        engines: built.
        context: context length that the run serves.
        rows: the prompts to train on.
        sets: the sets to evaluate on.
    """
    data, actor, rollout, trainer = options.train_data, options.actor, options.rollout, options.trainer
    session, dims = rlite.current_session(), engines.actor.dims
    ranks, sampling = dims.num_data_ranks, rollout.train_sampling_params
    sequences = data.prompts_per_rollout * options.responses_per_prompt
    per_update = sequences // actor.update_per_rollout
    plan = {
        "model": f"{actor.model_name}, {engines.actor.num_parameters / 1e6:.2f} M parameters",
        "devices": f"{len(session.devices)} x {session.device}, launcher {session.launcher.kind} = {dims}",
        "data": f"{rows.form}; {len(rows)} items" if rows.form else f"{len(rows)} items",
        "step": f"{data.prompts_per_rollout} prompts x {options.responses_per_prompt} responses = {sequences} "
        f"sequences, at most {sampling.max_new_tokens} new tokens in each of {rollout.max_turns} turn(s)",
        "sampling": f"{_sampling(sampling)}; evaluation {_sampling(rollout.evaluation_sampling)}",
        "context": context.describe(sampling.max_new_tokens),
        "update": f"{actor.update_per_rollout} optimizer step(s) of {per_update} sequences: {per_update // ranks} on "
        f"each of {ranks} data rank(s), in packs of at most {actor.max_length_per_device * dims.pack_factor} tokens",
        "filter": "groups of equal rewards are replaced" if options.has_dynamic_filtering else "every group is kept",
        "rollout": f"{len(engines.rollout.executors)} replica(s) of {rollout.tp_size} device(s), executor "
        f"{rollout.executor}, at most {rollout.max_num_seqs} sequences at once in each, {_pace(options)}",
        "loss": f"{actor.policy_loss.name}, mean per {actor.avg_level}, {advantage_plan(options)}",
        "run": f"{trainer.total_steps} steps, checkpoint every {trainer.save_freq}, in {trainer.save_dir}",
    }
    plan |= {f"evaluation {name}".strip(): _set_plan(each, options) for name, each in sets.items()}
    if unread := options.without_effect():
        plan["without effect"] = unread
    if options.is_greedy:
        plan["greedy"] = "training takes the most likely tokens and explores nothing"
    return plan


def _sampling(sampling: SamplingOptions) -> str:
    if not sampling.temperature:
        return "greedy"
    cut = [f"top_p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    cut += [f"top_k {sampling.top_k}"] if sampling.top_k > 0 else []
    return ", ".join([f"at temperature {sampling.temperature:g}", *cut])


def _set_plan(chosen: EvaluationSet, options: PpoConfig) -> str:
    """Return what an evaluation of a set does, and when."""
    own = options.test_data.get(chosen.name, HeldOutPromptOptions())
    where = "beside training" if options.trainer.evaluate == "beside" else "in turns with training"
    every = own.every or options.trainer.test_freq
    return f"{len(chosen.rows)} prompts x {chosen.samples} response(s), every {every} steps, {where}"


def _pace(options: PpoConfig) -> str:
    ahead = options.rollout.max_head_offpolicyness
    if not ahead:
        return "in turns with training"
    return f"beside training, at most {ahead} update(s) ahead (too old: {options.rollout.on_stale})"


def advantage_plan(options: PpoConfig) -> str:
    """Return how rewards become advantages, in words."""
    adv, kl = options.adv, options.kl
    mean = "batch" if adv.global_norm or options.responses_per_prompt == 1 else "group"
    deviation = f"divided by the {mean}'s deviation (GRPO)" if adv.norm_var else "not divided (Dr. GRPO)"
    plans = {
        "gae": f"GAE with gamma {adv.gamma}, lambda {adv.lamda}, critic {options.critic.model_name or 'as the actor'}",
        "reinforce": f"{mean} advantages {deviation}",
    }
    penalty = "" if kl.type is None else f", {kl.coef} x KL in the {kl.type}"
    return plans.get(adv.estimator, f"advantages by {adv.estimator}") + penalty
