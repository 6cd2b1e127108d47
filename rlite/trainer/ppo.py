"""Reinforcement learning with verifiable rewards: Dr. GRPO by default.

    python -m rlite.trainer.ppo actor.model_name=MODEL train_data.path=prompts.jsonl rollout.env_path=env.py
    torchrun --nproc_per_node=N -m rlite.trainer.ppo ...
    python -m rlite.trainer.ppo launcher=ray num_devices=N ...

A row of data holds `messages` or `prompt`; whatever else it holds reaches the reward.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict

import rlite
from rlite import config
from rlite.algorithms import group_advantages
from rlite.data.prompts import PromptStream, check_prompts, read_rows
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError
from rlite.observability import stats_tracker
from rlite.rollout import RewardFunction, RolloutWorkflow, SingleTurnWorkflow
from rlite.trainer.policy import AvgLevel, OptimizerOptions, PolicyLoss, policy_module, token_logprobs
from rlite.trainer.run import TrainerOptions, TrainingRun
from rlite.types import GenerationHyperparameters

SHOWN = (
    "reward",
    "accuracy",
    "loss",
    "entropy",
    "response_length",
    "truncated",
    "logprob_drift",
    "grad_norm",
    "seconds",
)
DRIFT_ALARM = 0.1
"""mean |log p(trainer) - log p(engine)| per token, in nats, above which the two are not the same policy"""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Prompts to train on."""

    path: str | None = None
    """JSON or JSONL file"""
    prompts_per_rollout: int = 32
    """prompts in one rollout batch"""
    responses_per_prompt: int = 1
    """responses to each prompt, a group; with 1 the batch's mean reward is the baseline"""


@dataclass(frozen=True, kw_only=True)
class TestOptions:
    """Prompts to evaluate on."""

    path: str | None = None
    """JSON or JSONL file; null evaluates nothing"""


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
    avg_level: AvgLevel = "token"
    """mean of the loss over: all tokens; sequences' means; tokens divided by a constant length (Dr. GRPO's paper)"""
    tis_coef: float | None = 2.0
    """cap of the importance weight trainer / engine; null is off"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""
    offload_model: bool | None = None
    """leave the device to generation between updates; default: on GPUs"""


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    """From rewards to advantages."""

    norm_var: bool = False
    """divide by the group's standard deviation (GRPO)"""


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
    """of the served weights; default: the actor's compute dtype"""
    gpu_memory_utilization: float = 0.6
    """share of a GPU's memory for generation"""
    max_num_seqs: int = 256
    """sequences that a replica decodes at once"""
    max_model_len: int | None = None
    """longest prompt and response together"""
    env_path: str | None = None
    """Python file with `async step(state, action, extra_info) -> {"reward": ..., "score": ..., "done": ...}`"""
    train_sampling_params: SamplingOptions = field(default_factory=SamplingOptions)
    """sampling for training"""
    test_sampling_params: SamplingOptions = field(default_factory=lambda: SamplingOptions(temperature=0.0))
    """sampling for evaluation"""


@dataclass(frozen=True, kw_only=True)
class PpoConfig:
    """Everything that a run is made of."""

    actor: ActorOptions
    train_data: PromptOptions = field(default_factory=PromptOptions)
    test_data: TestOptions = field(default_factory=TestOptions)
    adv: AdvantageOptions = field(default_factory=AdvantageOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    launcher: Literal["inprocess", "torchrun", "ray"] | None = None
    """what starts the workers; default: torchrun under torchrun, else one process"""
    num_devices: int | None = None
    """devices to use; default: one on CPU, all GPUs"""


class PpoTrainer:
    """Rolls out, computes advantages, updates, syncs; knows where it is and goes on from there.

    Needs a session: call `rlite.init()` first.

    Args:
        options: the run's config.
        workflow: turns one row into rewarded trajectories.
        train_rows: prompts to train on.
        test_rows: prompts to evaluate on; may be empty.
        test_workflow: as `workflow`, for evaluation.
    """

    def __init__(
        self,
        options: PpoConfig,
        workflow: RolloutWorkflow,
        train_rows: Sequence[Mapping[str, Any]],
        test_rows: Sequence[Mapping[str, Any]] = (),
        test_workflow: RolloutWorkflow | None = None,
    ) -> None:
        check_prompts(train_rows, "train_data")
        check_prompts(test_rows, "test_data")
        self.options = options
        self.workflow = workflow
        self.test_workflow = test_workflow or workflow
        self.test_rows = list(test_rows)
        self.prompts = PromptStream(train_rows, options.train_data.prompts_per_rollout, options.trainer.seed)
        self.loss = _loss(options)
        self.run = TrainingRun(options.trainer, options, SHOWN)
        self.engines = Engines(options)

    def fit(self) -> dict[str, float]:
        """Train to the last step; returns the last metrics."""
        self.start()
        metrics: dict[str, float] = {}
        for items in self.batches():
            with stats_tracker.record_timing("step"):
                batch = self.roll_out(items)
                batch = self.with_advantages(batch)
                self.update(batch)
                self.sync()
            metrics = self.finish_step(batch)
        self.run.close()
        return metrics

    # -- the phases ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build the engines, resume if asked, report the plan, evaluate once."""
        self.engines.build()
        facts = self.run.restore(self.engines.actor)
        self.prompts.position = facts.get("position", 0)
        if facts:
            self.sync()
            self.engines.rollout.set_version(self.run.step)
        self.run.open()
        self.run.console.report("rlite ppo", batch_plan(self.options, self.engines))
        if self.run.step == 0 and self.test_rows:
            self.run.log(self.evaluate())

    def batches(self) -> Any:
        """Prompts for each step that is left."""
        while self.run.step < self.options.trainer.total_steps:
            yield self.prompts.next()

    @stats_tracker.record_timing("rollout")
    def roll_out(self, items: Sequence[Mapping[str, Any]]) -> TensorDict:
        """Generate and reward a batch: each prompt's responses side by side."""
        return self.engines.rollout.rollout_batch(
            items, self.workflow, group_size=self.options.train_data.responses_per_prompt
        )

    def with_advantages(self, batch: TensorDict) -> TensorDict:
        """Add `advantages` [N, L], the same for all action tokens of a response."""
        is_single = self.options.train_data.responses_per_prompt == 1
        groups = torch.zeros_like(batch["group_ids"]) if is_single else batch["group_ids"]
        advantages = group_advantages(batch["rewards"].double(), groups, norm_std=self.options.adv.norm_var)
        batch["advantages"] = advantages.float()[:, None] * batch["loss_mask"]
        return batch

    @stats_tracker.record_timing("update")
    def update(self, batch: TensorDict) -> None:
        """The optimizer steps of one rollout batch."""
        self.engines.for_training()
        actor, num_updates = self.engines.actor, self.options.actor.update_per_rollout
        actor.train()
        if num_updates > 1:
            batch["old_logprobs"] = actor.forward(batch, token_logprobs)
        for rows in torch.arange(len(batch)).tensor_split(num_updates):
            stats = actor.train_batch(batch[rows], self.loss, self.loss.weight)
            actor.step_lr_scheduler()
            stats_tracker.scalar(**stats)

    @stats_tracker.record_timing("sync")
    def sync(self) -> None:
        """Serve the new weights."""
        report = self.engines.sync()
        stats_tracker.scalar(sync_bytes=report.num_bytes, sync_seconds=report.seconds)

    def evaluate(self) -> dict[str, float]:
        """The mean reward on the test rows."""
        with stats_tracker.record_timing("evaluate"):
            batch = self.engines.rollout.rollout_batch(self.test_rows, self.test_workflow)
        return {"accuracy": batch["rewards"].float().mean().item()}

    def finish_step(self, batch: TensorDict) -> dict[str, float]:
        """Count the step, evaluate and save where due, log."""
        self.run.step += 1
        metrics = {**batch_metrics(batch), **_flat(stats_tracker.export())}
        self._sample_rollouts(batch)
        if self.test_rows and self.run.is_due(self.options.trainer.test_freq):
            metrics |= self.evaluate()
        self.run.log(metrics)
        if metrics["logprob_drift"] > DRIFT_ALARM:
            self.run.console.report(
                f"ALARM at step {self.run.step}: the engine does not serve the policy that is trained",
                {"logprob_drift": f"{metrics['logprob_drift']:.3f} nats per token (limit {DRIFT_ALARM})"},
            )
        if self.run.is_due(self.options.trainer.save_freq):
            self.run.save(self.engines.actor, position=self.prompts.position)
        return metrics

    def _sample_rollouts(self, batch: TensorDict, count: int = 4) -> None:
        """Append a few of the step's rollouts to rollouts.jsonl."""
        tokenizer = self.engines.rollout.tokenizer
        with (self.run.folder / "rollouts.jsonl").open("a", encoding="utf-8") as file:
            for row in batch[:count]:
                ids, real = row["input_ids"], row["attention_mask"].bool()
                made = row["loss_mask"].bool()
                record = {
                    "step": self.run.step,
                    "reward": row["rewards"].item(),
                    "prompt": tokenizer.decode(ids[real & ~made]),
                    "response": tokenizer.decode(ids[made]),
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


class Engines:
    """The actor and the rollout engine on the same devices, taking turns where memory asks for it."""

    def __init__(self, options: PpoConfig) -> None:
        self._options = options
        self.rollout = RliteInferenceEngine(options.actor.model_name, executor=options.rollout.executor)
        self.actor = RliteTrainEngine(policy_module(options.actor.model_name, _optimizer(options)), executor="fsdp2")
        self._takes_turns = False

    def build(self) -> None:
        """Place both on all devices. Raises: ConfigError if the sizes do not divide the world."""
        session = rlite.current_session()
        world, actor, rollout = len(session.devices), self._options.actor, self._options.rollout
        for key, size in (("actor.ddp_size", actor.ddp_size), ("rollout.tp_size", rollout.tp_size)):
            if world % size:
                raise ConfigError(f"{key}={size} does not divide the world of {world} devices")
        self.rollout.build(
            tensor_parallel_size=rollout.tp_size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=rollout.max_model_len,
            dtype=rollout.dtype,
            seed=self._options.trainer.seed,
        )
        self._takes_turns = actor.offload_model if actor.offload_model is not None else session.device == "cuda"
        self.actor.build(
            tensor_parallel_size=world // actor.ddp_size,
            data_parallel_size=actor.ddp_size,
            colocate_with=self.rollout,
            max_tokens_per_microbatch=actor.max_length_per_device,
            max_grad_norm=actor.max_grad_norm,
            gradient_checkpointing=actor.gradient_checkpointing,
            seed=self._options.trainer.seed,
        )

    def for_training(self) -> None:
        """Give the devices to the actor."""
        if self._takes_turns:
            self.rollout.meta()
            self.actor.cuda()

    def sync(self) -> Any:
        """Write the actor's weights into the rollout engine, and give it the devices."""
        if not self._takes_turns:
            return self.actor.p2p_weight_sync(self.rollout)
        self.actor.cuda()
        self.rollout.cuda("weights")
        report = self.actor.p2p_weight_sync(self.rollout)
        self.actor.cpu()
        self.rollout.cuda("kv_cache")
        return report


def batch_plan(options: PpoConfig, engines: Engines) -> dict[str, str]:
    """How a step's work is divided, in words and numbers."""
    data, actor, rollout = options.train_data, options.actor, options.rollout
    prompts, responses = data.prompts_per_rollout, data.responses_per_prompt
    ranks = engines.actor.num_data_ranks
    sequences = prompts * responses
    longest = rollout.train_sampling_params.max_new_tokens
    return {
        "model": f"{actor.model_name}, {_count(engines.actor.module)} parameters",
        "devices": f"{ranks} x {rlite.current_session().device}, launcher {rlite.current_session().launcher.kind}",
        "step": f"{prompts} prompts x {responses} responses = {sequences} sequences of at most {longest} new tokens",
        "update": f"{actor.update_per_rollout} optimizer step(s) of about {sequences // actor.update_per_rollout} sequences; "
        f"{sequences // actor.update_per_rollout // ranks} on each of {ranks} rank(s), packed into microbatches of at most "
        f"{actor.max_length_per_device} tokens",
        "rollout": f"{len(engines.rollout.executors)} replica(s) of {rollout.tp_size} device(s), "
        f"at most {rollout.max_num_seqs} sequences each at once, executor {rollout.executor}",
        "loss": f"clip {actor.clip}, mean per {actor.avg_level}, advantages "
        + (
            "divided by the group's deviation (GRPO)"
            if options.adv.norm_var
            else "not divided by the deviation (Dr. GRPO)"
        ),
        "run": f"{options.trainer.total_steps} steps, checkpoint every {options.trainer.save_freq}, in {options.trainer.save_dir}",
    }


def batch_metrics(batch: TensorDict) -> dict[str, float]:
    """What a batch of rollouts says of itself."""
    lengths = batch["loss_mask"].sum(-1).float()
    metrics = {"reward": batch["rewards"].float().mean().item(), "response_length": lengths.mean().item()}
    if "truncated" in batch.keys():
        metrics["truncated"] = batch["truncated"].float().mean().item()
    return metrics


def env_reward(path: str) -> Callable[..., Any]:
    """The reward of an environment file: its `step` after one turn. Raises: ConfigError if there is no such thing."""
    if not Path(path).is_file():
        raise ConfigError(f"rollout.env_path={path!r}: no such file")
    spec = importlib.util.spec_from_file_location("rlite_env", path)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "step", None)):
        raise ConfigError(
            f"rollout.env_path={path!r}: expected a function `async step(state, action, extra_info)` in it"
        )

    async def reward(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
        response = await module.step(prompt, completions, data.get("extra_info", {}))
        return float(response["reward"])

    return reward


def _loss(options: PpoConfig) -> PolicyLoss:
    actor, sampling = options.actor, options.rollout.train_sampling_params
    return PolicyLoss(
        clip_low=actor.clip,
        clip_high=actor.clip if actor.clip_high is None else actor.clip_high,
        avg_level=actor.avg_level,
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        tis_coef=actor.tis_coef,
        entropy_coef=actor.entropy_coef,
    )


def _optimizer(options: PpoConfig) -> OptimizerOptions:
    total = options.trainer.total_steps * options.actor.update_per_rollout
    return OptimizerOptions(
        lr=options.actor.lr,
        weight_decay=options.actor.weight_decay,
        scheduler=options.actor.scheduler,
        warmup_steps=round(options.actor.warmup_ratio * total),
        total_steps=total,
    )


def _launch(options: PpoConfig) -> dict[str, Any]:
    """Arguments of rlite.init: one device under plain python on CPU."""
    is_plain = options.launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ
    if is_plain and options.num_devices is None and not torch.cuda.is_available():
        return {"num_devices": 1}
    return {"launcher": options.launcher, "num_devices": options.num_devices}


def _flat(stats: Mapping[str, float]) -> dict[str, float]:
    """Phase timings under "seconds_...", the rest as it is."""
    renamed = {key.replace("timeperf/", "seconds_"): value for key, value in stats.items()}
    return {"seconds" if key == "seconds_step" else key: value for key, value in renamed.items()}


def _count(module: torch.nn.Module) -> str:
    number = sum(parameter.numel() for parameter in module.parameters())
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def main(argv: Sequence[str]) -> None:
    """Run the trainer from the command line."""
    options = config.load(PpoConfig, argv, aliases={"actor.rollout.env_path": "rollout.env_path"})
    missing = [
        key
        for key, value in (("train_data.path", options.train_data.path), ("rollout.env_path", options.rollout.env_path))
        if not value
    ]
    if missing or options.train_data.path is None or options.rollout.env_path is None:
        raise ConfigError(f"missing: {', '.join(missing)}")
    train_rows = read_rows(options.train_data.path)
    test_rows = read_rows(options.test_data.path) if options.test_data.path else []
    rlite.init(**_launch(options))
    reward = RewardFunction(env_reward(options.rollout.env_path))
    tokenizer = RliteInferenceEngine(options.actor.model_name).tokenizer
    sampling = options.rollout
    PpoTrainer(
        options,
        SingleTurnWorkflow(reward, sampling.train_sampling_params.gconfig(), tokenizer),
        train_rows,
        test_rows,
        SingleTurnWorkflow(reward, sampling.test_sampling_params.gconfig(), tokenizer),
    ).fit()
    rlite.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
