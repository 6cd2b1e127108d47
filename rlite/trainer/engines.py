"""The two engines of a reinforcement-learning trainer on the same devices, and their options."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import rlite
from rlite.algorithms import check_policy_loss
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.engine.weight_sync import SyncReport
from rlite.errors import ConfigError, UnknownOptionError
from rlite.trainer.policy import AvgLevel, OptimizerOptions, policy_module
from rlite.types import GenerationHyperparameters


@dataclass(frozen=True, kw_only=True)
class PolicyLossOptions:
    """What turns log-probabilities and advantages into a loss."""

    name: str = "ppo_clip"
    """a name of `rlite.algorithms.POLICY_LOSSES`"""
    options: dict[str, Any] = field(default_factory=dict)
    """of that loss, its keyword parameters; ppo_clip has its range from actor.clip"""

    def __post_init__(self) -> None:
        try:
            check_policy_loss(self.name, self.options)
        except UnknownOptionError as error:
            raise ConfigError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    """The policy that is trained."""

    model_name: str
    """folder or hub name of a Hugging Face checkpoint"""
    ddp_size: int = 1
    """copies of the model; each is sharded over world / ddp_size devices"""
    max_length_per_device: int = 16384
    """tokens in one microbatch; the longest sequence must fit"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    lr: float = 1e-6
    """peak learning rate of AdamW"""
    weight_decay: float = 1e-2
    """of AdamW"""
    max_grad_norm: float = 1.0
    """global norm to which gradients are clipped"""
    scheduler: Literal["constant", "cosine", "linear"] = "constant"
    """after the warm-up"""
    warmup_ratio: float = 0.0
    """share of all optimizer steps in which the rate rises"""
    update_per_rollout: int = 1
    """optimizer steps on each rollout batch"""
    clip: float = 0.2
    """PPO's clip range below 1 (and above, unless clip_high says otherwise)"""
    clip_high: float | None = None
    """clip range above 1"""
    policy_loss: PolicyLossOptions = field(default_factory=PolicyLossOptions)
    """the loss of each token"""
    avg_level: AvgLevel = "token"
    """mean of the loss over: all tokens; sequences' means; tokens divided by a constant length (Dr. GRPO's paper)"""
    tis_coef: float | None = 2.0
    """cap of the importance weight trainer / engine; null is off"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""
    offload_model: bool | None = None
    """leave the device to generation between updates; default: on GPUs"""

    def optimizer(self, total_steps: int) -> OptimizerOptions:
        """AdamW over so many optimizer steps."""
        return OptimizerOptions(
            lr=self.lr,
            weight_decay=self.weight_decay,
            scheduler=self.scheduler,
            warmup_steps=round(self.warmup_ratio * total_steps),
            total_steps=total_steps,
        )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How responses are sampled."""

    temperature: float = 1.0
    """0 is greedy"""
    max_new_tokens: int = 1024
    """longest response"""
    top_p: float = 1.0
    """1 is off"""
    top_k: int = 0
    """0 is off"""
    stop: list[str] = field(default_factory=list)
    """texts that end a response"""

    def gconfig(self) -> GenerationHyperparameters:
        return GenerationHyperparameters(
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop),
        )


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """The engine that generates, and what rewards it."""

    executor: str = "torch"
    """inference executor"""
    tp_size: int = 1
    """devices that share one replica"""
    dtype: str | None = None
    """of the served weights; default: the checkpoint's"""
    gpu_memory_utilization: float = 0.6
    """share of a GPU's memory for generation"""
    max_num_seqs: int = 256
    """sequences that a replica decodes at once"""
    max_model_len: int | None = None
    """longest prompt and response together"""
    env_path: str | None = None
    """Python file with `async step(state, action, extra_info)`; it returns the keys `rlite.rollout.env.STEP_KEYS`"""
    train_sampling_params: SamplingOptions = field(default_factory=SamplingOptions)
    """sampling for training"""
    test_sampling_params: SamplingOptions = field(default_factory=lambda: SamplingOptions(temperature=0.0))
    """sampling for evaluation"""


class Engines:
    """The actor and the rollout engine on the same devices, taking turns where memory asks for it."""

    def __init__(self, actor: ActorOptions, rollout: RolloutOptions, num_updates: int, seed: int) -> None:
        self._actor_options, self._rollout_options, self._seed = actor, rollout, seed
        self.rollout = RliteInferenceEngine(actor.model_name, executor=rollout.executor)
        self.actor = RliteTrainEngine(policy_module(actor.model_name, actor.optimizer(num_updates)), executor="fsdp2")
        self._takes_turns = False

    def build(self) -> None:
        """Place both on all devices. Raises: ConfigError if the sizes do not divide the world."""
        session = rlite.current_session()
        world, actor, rollout = len(session.devices), self._actor_options, self._rollout_options
        for key, size in (("actor.ddp_size", actor.ddp_size), ("rollout.tp_size", rollout.tp_size)):
            if world % size:
                raise ConfigError(f"{key}={size} does not divide the world of {world} devices")
        self.rollout.build(
            tensor_parallel_size=rollout.tp_size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=rollout.max_model_len,
            dtype=rollout.dtype,
            seed=self._seed,
        )
        self._takes_turns = actor.offload_model if actor.offload_model is not None else session.device == "cuda"
        self.actor.build(
            tensor_parallel_size=world // actor.ddp_size,
            data_parallel_size=actor.ddp_size,
            colocate_with=self.rollout,
            max_tokens_per_microbatch=actor.max_length_per_device,
            max_grad_norm=actor.max_grad_norm,
            gradient_checkpointing=actor.gradient_checkpointing,
            seed=self._seed,
        )

    def for_training(self) -> None:
        """Give the devices to the actor."""
        if self._takes_turns:
            self.rollout.meta()
            self.actor.cuda()

    @contextmanager
    def actor_on_device(self) -> Iterator[None]:
        """Around a checkpoint: the actor on the device, and what is served on the host meanwhile."""
        if self._takes_turns:
            self.rollout.cpu()
            self.actor.cuda()
        yield
        if self._takes_turns:
            self.actor.cpu()
            self.rollout.cuda()

    def sync(self) -> SyncReport:
        """Write the actor's weights into the rollout engine, and give it the devices."""
        if not self._takes_turns:
            return self.actor.p2p_weight_sync(self.rollout)
        self.actor.cuda()
        self.rollout.cuda("weights")
        report = self.actor.p2p_weight_sync(self.rollout)
        self.actor.cpu()
        self.rollout.cuda("kv_cache")
        return report


def init_devices(launcher: Literal["inprocess", "torchrun", "ray"] | None, num_devices: int | None) -> None:
    """`rlite.init` as trainers do it: one device under plain python on CPU, else as rlite.init chooses."""
    is_plain = launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ
    if is_plain and num_devices is None and not torch.cuda.is_available():
        num_devices = 1
    rlite.init(launcher=launcher, num_devices=num_devices)
