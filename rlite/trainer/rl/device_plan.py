"""The device plan: which devices train, generate and evaluate, and the engines of a run that are placed on them."""

from __future__ import annotations

from typing import Any

import rlite
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError
from rlite.runtime.replicas.replica import Capabilities
from rlite.trainer.model.modules import critic_module, policy_module, trained_engine
from rlite.trainer.model.options import ModelOptions, frozen_build_options
from rlite.trainer.options import TrainerOptions
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.options import PpoConfig, ReferenceOptions, RolloutOptions
from rlite.trainer.rl.reward_engines import RewardEngines
from rlite.trainer.rl.routing import RoutingReplay
from rlite.trainer.rl.truncation import check_engine


def without_evaluation(world: int, trainer: TrainerOptions, tp_size: int) -> tuple[int, int]:
    """Return the number of devices that train and generate, and of devices that only evaluate."""
    if trainer.evaluate != "beside":
        return world, 0
    evaluating = trainer.evaluation_devices or tp_size
    if evaluating % tp_size:
        raise ConfigError(f"trainer.evaluation_devices={evaluating}: rollout.tp_size={tp_size} does not divide it")
    if evaluating >= world:
        raise ConfigError(
            f"trainer.evaluate=beside: evaluations need devices of their own, {evaluating} of them, and there are "
            f"{world} in all. Give more (num_devices=2 launcher=ray), or let training wait (trainer.evaluate=in_turns)"
        )
    return world - evaluating, evaluating


def divide_devices(world: int, rollout: RolloutOptions) -> tuple[int, int]:
    """Return the number of devices that train, and of devices that generate: all do both, unless rollouts run ahead."""
    generating = world
    if rollout.max_head_offpolicyness:
        generating = rollout.num_devices or max(world // 2 // rollout.tp_size, 1) * rollout.tp_size
        if not 0 < generating < world:
            raise ConfigError(
                f"rollout.max_head_offpolicyness={rollout.max_head_offpolicyness}: rollouts that run beside training "
                f"need devices of their own, {generating} of them, and there are {world} in all. Give more "
                "(num_devices=2 launcher=ray), or let them take turns (rollout.max_head_offpolicyness=0)"
            )
    if generating % rollout.tp_size:
        raise ConfigError(f"rollout.tp_size={rollout.tp_size} does not divide {generating} devices for generation")
    return world if generating == world else world - generating, generating


def models_beside(options: PpoConfig, engines: Engines) -> list[tuple[RliteTrainEngine, ReferenceOptions]]:
    """Return the engines beside the actor that hold a model of their own, with their options."""
    teachers = list(options.distill.teacher.values())
    found: list[tuple[RliteTrainEngine | None, ReferenceOptions]] = [
        (engines.critic, options.critic),
        (engines.reference, options.ref_actor),
        *((engine, teachers[number]) for number, engine in engines.teachers.items()),
    ]
    return [(engine, own) for engine, own in found if engine is not None]


def _adapter_obstacle(options: PpoConfig, actor: Any, can: Capabilities) -> str:
    """Return why weight syncs do not send the actor's adapter alone; "" if they do."""
    rollout, why_not = options.rollout, can.adapter_obstacle
    rank = 1 if options.actor.lora is None else options.actor.lora.rank
    obstacles = (
        actor.adapter_obstacle(),
        "its executor serves no adapters" if why_not is None else why_not(rollout.executor_options, rank),
        "rollout.verify_sync compares whole weights" if rollout.verify_sync else "",
        "rollout.adapter_sync=false merges it into the weights" if rollout.adapter_sync is False else "",
    )
    found = [told for told in obstacles if told]
    if rollout.adapter_sync and found:
        raise ConfigError(f"rollout.adapter_sync=true: {found[0]}; leave it out, or set it to false")
    if options.actor.deterministic and options.actor.lora is not None and found:
        told = "the adapter has to travel alone, for merged weights have other bits"
        raise ConfigError(f"actor.deterministic=true with actor.lora: {told}, and {found[0]}")
    return next(iter(found), "")


class DevicePlan:
    """Makes the engines of a run, and places them.

    `max_model_len`: longest sequence that the rollout engine serves, in tokens; None is the engine's default.
    `rewards`: reward models; None if there are none.
    """

    def __init__(
        self, options: PpoConfig, max_model_len: int | None = None, rewards: RewardEngines | None = None
    ) -> None:
        self._options, self._max_model_len, self._rewards = options, max_model_len, rewards
        actor, trainer = options.actor, options.trainer
        rollout = self._inference_engine()
        check_engine(options.rollout, rollout.extras)
        can, told = rollout.capabilities, f"rollout.executor={rollout.executor_name}"
        if can.has_shared_weights and trainer.evaluate != "in_turns":
            why = "evaluations would have weights of their own, and the servers serve one policy"
            raise ConfigError(f"{told}, trainer.evaluate={trainer.evaluate}: {why}; use trainer.evaluate=in_turns")
        num_updates = max(trainer.total_steps - actor.freeze_steps, 1) * actor.update_per_rollout
        critic = reference = None
        if options.has_critic:
            own = options.critic.as_model(actor)
            critic = trained_engine(critic_module, own, trainer.total_steps * actor.update_per_rollout)
        if options.has_reference and not options.is_base_reference:
            reference = RliteTrainEngine(policy_module(options.ref_actor.as_model(actor).model_name))
        evaluation = None if trainer.evaluate == "in_turns" else self._inference_engine()
        trained = trained_engine(policy_module, actor, num_updates)
        whole = _adapter_obstacle(options, trained.module, can)
        self._sends_adapter = not whole
        if obstacle := can.sync_obstacle(options.rollout.executor_options):
            if whole:
                raise ConfigError(f"{told}: {obstacle}. Training needs a policy that gets new weights, and {whole}")
            if trainer.evaluate != "in_turns":
                raise ConfigError(f"{told}, trainer.evaluate={trainer.evaluate}: {obstacle}; use in_turns")
        self.routing = RoutingReplay.of(actor.routing_replay, trained.module, rollout)
        """the experts that training replays"""
        teachers = {
            number: RliteTrainEngine(policy_module(own.as_model(actor).model_name))
            for number, own in enumerate(options.distill.teacher.values())
            if own.has_engine
        }
        roles = {"actor": trained, "critic": critic, "reference": reference, "evaluation": evaluation}
        for role, engine in [*roles.items(), ("rollout", rollout), *(("teacher", own) for own in teachers.values())]:
            if engine is not None:
                engine.role = role
        self.engines = Engines(rollout, trained, critic, reference, teachers, evaluation)

    def build(self) -> None:
        """Place the engines. Their sizes must divide the devices, else a ConfigError is raised."""
        session, options, engines = rlite.current_session(), self._options, self.engines
        rollout, actor = options.rollout, options.actor
        world = len(session.devices)
        if self._rewards is not None:
            world = self._rewards.build_apart(world, options.trainer.seed)
        num_shared, num_evaluating = without_evaluation(world, options.trainer, rollout.tp_size)
        num_training, num_generating = divide_devices(num_shared, rollout)
        models = self.models(num_training)
        self._build_inference(engines.rollout, num_generating)
        if engines.evaluation is not None and not num_evaluating:
            has_residency = engines.rollout.capabilities.has_residency
            if has_residency:  # an engine sizes its KV cache by the memory that it finds free
                engines.rollout.cpu()
            self._build_inference(engines.evaluation, num_generating, engines.rollout)
            if has_residency:
                engines.rollout.cuda()
        default = session.device == "cuda" if actor.offload_model is None else actor.offload_model
        engines.verify_every, engines.sends_adapter = rollout.verify_sync, self._sends_adapter
        engines.is_apart = rollout.max_head_offpolicyness > 0
        can_leave = engines.rollout.capabilities.has_residency and not engines.is_apart
        engines.takes_turns = {engines.rollout: default and can_leave}
        engines.resident = engines.rollout if engines.takes_turns[engines.rollout] else None
        owner = engines.actor if engines.is_apart else engines.rollout
        for engine, own, offload in models:
            engine.build(**own, colocate_with=None if engine is owner else owner)
            engines.takes_turns[engine] = default if offload is None else offload
        if engines.evaluation is not None and num_evaluating:
            self._build_inference(engines.evaluation, num_evaluating)
        if self._rewards is not None:
            self._rewards.build_beside(engines.rollout, num_generating, options.trainer.seed)

    def models(self, num_devices: int) -> list[tuple[RliteTrainEngine, dict[str, Any], bool | None]]:
        """Return the engines that train or score, the actor first, with build options and `offload_model` of each."""
        options, actor, device = self._options, self._options.actor, rlite.current_session().device
        found: list[tuple[RliteTrainEngine, ModelOptions, bool | None]] = [
            (self.engines.actor, actor, actor.offload_model)
        ]
        for engine, others in models_beside(options, self.engines):
            found.append((engine, others.as_model(actor), others.offload_model))
        made = []
        for engine, model, offload in found:
            own = model.build_options(num_devices, options.trainer.seed)
            is_trained = engine in self.engines.trained
            made.append((engine, own if is_trained else frozen_build_options(own, device), offload))
        return made

    def _inference_engine(self) -> RliteInferenceEngine:
        rollout, name = self._options.rollout, self._options.actor.model_name
        return RliteInferenceEngine(name, executor=rollout.executor, max_replacements=rollout.max_replacements)

    def _build_inference(
        self, engine: RliteInferenceEngine, num_devices: int, beside: RliteInferenceEngine | None = None
    ) -> None:
        options = self._options
        own = options.rollout.build_options(num_devices)
        if engine is self.engines.rollout:
            own.update(self.routing.engine_options)
        if options.trainer.evaluate == "snapshot":
            own["gpu_memory_utilization"] /= 2  # two engines on the same devices
        engine.build(**own, max_model_len=self._max_model_len, seed=options.trainer.seed, colocate_with=beside)
        engine.rollout_options = options.collector_options().replace(extras=self.routing.extras)
