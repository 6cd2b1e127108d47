"""The plans of runs: how the work of a step is divided, in words and numbers for the console."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import rlite
from rlite.assembly.workflows import Context
from rlite.backends.models.experts import experts_of
from rlite.data.rows import Rows, described
from rlite.engine.train import RliteTrainEngine
from rlite.errors import shortened
from rlite.evaluation.sets import EvaluationSet
from rlite.nn.pretrained import end_ids
from rlite.rollout.environments.file import EnvironmentOptions
from rlite.rollout.rewards.options import Rewards
from rlite.rollout.rewards.weighted import compares_groups
from rlite.rollout.workflow import PromptWorkflow, RolloutWorkflow, SingleTurnWorkflow
from rlite.runtime.parallel.dims import ParallelDims
from rlite.trainer.held_out import HeldOutPromptOptions
from rlite.trainer.model.options import OptimizerOptions, ParameterGroupOptions
from rlite.trainer.options import TableOptions
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.folder import PRINTS
from rlite.trainer.run.schedule import sampling_plan, topic_of
from rlite.wording import counted

WHERE = {
    "in_turns": "in turns with training",
    "beside": "beside training",
    "snapshot": "beside training, on the devices of the rollouts",
}
"""description of the place of evaluations, by trainer.evaluate"""
REWARD_ARGUMENTS = ("completions", "prompt_ids", "completion_ids")
"""arguments of reward functions that columns of these names do not reach"""
EQUAL_GROUPS = ("every group is kept", "groups of equal rewards are replaced")
OF_GROUPS = "the responses to a prompt are scored in one call"


@dataclass(frozen=True)
class BatchPlan:
    """Division of a step's work, in words and numbers."""

    options: PpoConfig
    engines: Engines
    """built"""
    workflow: RolloutWorkflow
    """makes the rollouts to train on"""
    context: Context
    """context length that the run serves"""
    rows: Rows
    """the prompts to train on"""
    sets: Mapping[str, EvaluationSet]
    """the sets to evaluate on"""

    def topics(self) -> dict[str, str]:
        """Return the plan in words and numbers by topic."""
        options, engines, workflow, context, rows = self.options, self.engines, self.workflow, self.context, self.rows
        data, actor, rollout, run = options.train_data, options.actor, options.rollout, options.trainer
        session, dims = rlite.current_session(), engines.actor.dims
        ranks, sampling = dims.num_data_ranks, rollout.train_sampling_params
        sequences = options.num_sequences
        per_update = sequences // actor.update_per_rollout
        form = described(rows, engines.rollout.tokenizer if isinstance(workflow, PromptWorkflow) else None)
        plan = {
            **model_plan(actor.model_name, engines.actor, actor.max_grad_norm),
            **engines.actor.choices(),
            **self._critic(),
            "devices": f"{len(session.devices)} x {session.device}, launcher {session.launcher.kind} = {dims}",
            "data": "; ".join(filter(None, (form, f"{len(rows)} items" if rows.stream is None else str(rows.stream)))),
            **data_plan(data),
            "reward": self._reward(),
            "step": f"{data.prompts_per_rollout} prompts x {options.responses_per_prompt} responses = {sequences} "
            f"sequences, at most {sampling.max_new_tokens} new tokens in each of {counted(rollout.max_turns, 'turn')}, "
            f"with at most {context.host_gib(sequences, context.length):.2g} GiB of host memory",
            "sampling": sampling_plan(sampling.temperature, sampling.top_p, sampling.top_k),
            "context": context.describe(sampling.max_new_tokens),
            "update": f"{counted(actor.update_per_rollout, 'optimizer step')} of {per_update} sequences: "
            f"{per_update // ranks} on each of {counted(ranks, 'data rank')}, in packs of at most "
            f"{actor.max_length_per_device * dims.pack_factor} tokens",
            "filter": EQUAL_GROUPS[options.has_dynamic_filtering],
            "rollout": f"{counted(len(engines.rollout.copies), 'replica')} of {counted(rollout.tp_size, 'device')}, "
            f"executor {rollout.executor}, at most {rollout.max_num_seqs} sequences at once in each, {self._pace()}",
            "loss": f"{_with_options(actor.policy_loss.name, actor.policy_loss.options)}, mean per {actor.avg_level}, "
            f"{self._advantages()}",
            "run": f"{counted(run.total_steps, 'step')}, checkpoint every {run.save_freq}, in {run.save_dir}",
        }
        plan |= {topic_of(name): self._set(each) for name, each in self.sets.items()}
        if hidden := [name for name in REWARD_ARGUMENTS if name in rows[0]]:
            names = ", ".join(hidden)
            plan["hidden columns"] = f"{names}: reward functions receive values of the rollout by these names"
        if schedules := [f"{name} {points}" for name, points in options.schedule if points]:
            place = "in place of the options of these names"
            plan["schedules"] = f"{', '.join(schedules)}: by step, straight lines between them, {place}"
        if unread := options.without_effect():
            plan["without effect"] = unread
        if not all(one.in_process or one.path is None for one in options.reward.values()):
            plan["prints"] = f"what a reward prints in its process is shown once, and kept in {PRINTS}"
        if not (sampling.stop or sampling.stop_token_ids or end_ids(actor.model_name)):
            remedy = "add it, or give train_sampling_params.stop"
            plan["no end"] = f"the model has no eos_token_id: no response ends early; {remedy}"
        if not sampling.temperature:
            plan["greedy"] = "training takes the most likely tokens and explores nothing"
        return plan

    def _reward(self) -> str:
        options = self.options
        if options.distill.is_without_rewards and not options.sources_of_rewards:
            return "none, a teacher judges"
        return reward_plan(options.reward, options.rollout, self.workflow)

    def _critic(self) -> dict[str, str]:
        if (engine := self.engines.critic) is None:
            return {}
        model = self.options.critic.as_model(self.options.actor)
        plan = {**model_plan(model.model_name, engine, model.max_grad_norm), **engine.choices()}
        return {("critic" if topic == "model" else f"critic's {topic}"): text for topic, text in plan.items()}

    def _set(self, chosen: EvaluationSet) -> str:
        """Return what an evaluation of a set does, when, and where."""
        options = self.options
        own = options.test_data.get(chosen.name, HeldOutPromptOptions())
        return f"{chosen.plan(own, options.trainer.test_freq, options.reward)}, {WHERE[options.trainer.evaluate]}"

    def _pace(self) -> str:
        rollout = self.options.rollout
        if not (ahead := rollout.max_head_offpolicyness):
            return "in turns with training"
        return f"beside training, at most {counted(ahead, 'update')} ahead (too old: {rollout.on_stale})"

    def _advantages(self) -> str:
        """Return how rewards become advantages, in words."""
        options = self.options
        if options.distill.is_without_rewards:
            return "of teachers alone"
        adv, kl = options.adv, options.kl
        mean = "batch" if adv.global_norm or options.responses_per_prompt == 1 else "group"
        deviation = f"divided by the {mean}'s deviation (GRPO)" if adv.norm_var else "not divided (Dr. GRPO)"
        gae = f"GAE with gamma {adv.gamma}, lambda {adv.lamda}, critic {options.critic.model_name or 'as the actor'}"
        plans = {"gae": gae, "reinforce": f"{mean} advantages {deviation}"}
        penalty = "" if kl.type is None else f", {kl.coef} x KL in the {kl.type}"
        return plans.get(adv.estimator, f"advantages by {_with_options(adv.estimator, adv.options)}") + penalty


def _with_options(name: str, options: Mapping[str, Any]) -> str:
    """Return the name of an algorithm, with the options that are set."""
    return f"{name} ({', '.join(f'{key}={value}' for key, value in options.items())})" if options else name


def reward_plan(reward: Rewards, rollout: EnvironmentOptions, workflow: RolloutWorkflow) -> str:
    """Return where rewards come from, in words: the functions with their weights, or another source.

    `reward`: the rewards by name; there may be none.
    """
    if reward:
        parts = ", ".join(f"{name} x {one.weight:g} ({one.source})" for name, one in reward.items())
        is_of_groups = isinstance(workflow, SingleTurnWorkflow) and compares_groups(workflow.reward_fn)
        return f"{parts}; {OF_GROUPS}" if is_of_groups else parts
    sources = {"environment": rollout.env_path, "workflow": rollout.workflow}
    return next((f"{what} {name}" for what, name in sources.items() if name), "the program's workflow")


OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}


def model_plan(name: str, engine: RliteTrainEngine, max_grad_norm: float) -> dict[str, str]:
    """Return the size of a model, its optimizer, and the parameters that are trained otherwise, by topic."""
    module: Any = engine.module
    options: OptimizerOptions = module.optimizer_options
    plan = {
        "model": f"{name}, {engine.num_parameters / 1e6:.2f} M parameters{_trained(engine)}",
        "optimizer": f"{OPTIMIZERS[options.name]}, {_rate(options)}, weight decay {options.weight_decay:g}, gradients "
        f"clipped to norm {max_grad_norm:g}",
        "shared prefixes": f"not used: {obstacle}"
        if (obstacle := engine.prefix_obstacle())
        else "computed once in each microbatch, where that saves work",
    }
    if experts_of(module):
        plan["experts"] = expert_parallel_plan(module, engine.dims)
    if module.lora is not None:
        lora = module.lora
        targets = ", ".join([*lora.target_modules, *lora.target_parameters])
        plan["adapters"] = f"rank {lora.rank}, alpha {lora.alpha:g}, {targets}"
        if experts_of(module) and not lora.target_parameters:
            plan["adapters"] += "; the experts have none (target_parameters)"
    if groups := options.parameter_groups:
        plan["parameter groups"] = "; ".join(_group(*each) for each in groups.items())
    return plan


def expert_parallel_plan(module: Any, dims: Any) -> str:
    """Return where the experts of a mixture lie, in words."""
    layers = experts_of(module)
    number = next(iter(layers.values())).num_experts
    told = f"{number} in each of {counted(len(layers), 'layer')}"
    if not isinstance(dims, ParallelDims):
        return told
    share = f"sharded over {counted(dims.num_expert_shards, 'rank')}"
    if dims.expert == 1:
        return f"{told}, {share}"
    return f"{told}: {number // dims.expert} on each of ep_size={dims.expert} ranks, {share} of equal experts (efsdp)"


def data_plan(data: TableOptions) -> dict[str, str]:
    """Return the system prompt and the options of the chat template, by topic, as far as they are set."""
    said: Mapping[str, Any] = {"system prompt": data.system_prompt, "chat template": data.chat_template_options}
    return {topic: shortened(value) for topic, value in said.items() if value}


def _trained(engine: RliteTrainEngine) -> str:
    trained = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    share = "all" if trained == engine.num_parameters else f"{trained / engine.num_parameters:.2%}"
    return f", {share} trained"


def _rate(options: OptimizerOptions) -> str:
    warmup = f" after {options.warmup_steps} steps of warm-up" if options.warmup_steps else ""
    end = "" if options.scheduler == "constant" else f" to {options.lr_end:g}"
    return f"lr {options.lr:g} ({options.scheduler}{end}{warmup})"


def _group(name: str, group: ParameterGroupOptions) -> str:
    decay = "" if group.weight_decay is None else f", weight decay {group.weight_decay:g}"
    how = "frozen" if group.freeze else f"lr x {group.lr_factor:g}{decay}"
    return f"{name} ({group.pattern}): {how}"
