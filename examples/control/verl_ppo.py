"""verl's PPO under the control plane: workloads around its worker classes, and its order of calls.

    python -m verl.trainer.main_ppo ... --cfg job --resolve > options.yaml
    python examples/control/verl_ppo.py options.yaml

The example is written for verl 0.9.1 with a critic, a reference and a reward function. As in verl, actors and rollouts
are one class; the options choose its engines (FSDP or Megatron, vLLM or SGLang). verl starts its inference servers
itself, beside the actors. The example needs verl's own environment with 8 GPUs; docs/control.md says what of it has
never run.
"""

import asyncio
import os
import sys
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from omegaconf import OmegaConf
from torch.utils.data import DataLoader
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.agent_loop import AgentLoopManager
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage, compute_response_mask
from verl.trainer.ppo.reward import resolve_reward_manager_cls
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

import rlite
from rlite.control import BaseTrainer, BaseWorkload, RLJobBuilder

GPUS = {"actor": 4, "critic": 2, "reference": 1, "reward": 1}


class Model(BaseWorkload):
    def __init__(self, master_handle: Any, config: Any) -> None:
        super().__init__(master_handle, config)
        address = {"MASTER_ADDR": self.torch_master_addr, "MASTER_PORT": str(self.torch_master_port)}
        os.environ.update(address, RANK=str(self.rank), WORLD_SIZE=str(self.world_size), LOCAL_RANK="0")
        self.loop = asyncio.new_event_loop()


class Actor(Model):
    """Trains the policy, and sends its weights to verl's server beside it."""

    def init_model(self) -> int:
        self.worker = ActorRolloutRefWorker(config=self.config.actor_rollout_ref, role="actor_rollout")
        self.worker.init_model()
        return self.worker._query_dispatch_info("actor")

    def log_probs(self, data: Any) -> Any:
        return self.worker.compute_log_prob(data)

    def train(self, data: Any) -> Any:
        return self.worker.update_actor(data)

    def send_weights(self, step: int) -> None:
        self.loop.run_until_complete(self.worker.update_weights(global_steps=step, mode="naive"))

    def save(self, folder: str, step: int) -> None:
        self.worker.save_checkpoint(folder, global_step=step)

    def load(self, folder: str) -> None:
        self.worker.load_checkpoint(folder)


class Reference(Model):
    def init_model(self) -> int:
        self.worker = ActorRolloutRefWorker(config=self.config.actor_rollout_ref, role="ref")
        self.worker.init_model()
        return self.worker._query_dispatch_info("ref")

    def log_probs(self, data: Any) -> Any:
        return self.worker.compute_ref_log_prob(data)


class Critic(Model):
    def init_model(self) -> int:
        critic = omega_conf_to_dataclass(self.config.critic)
        critic.engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
        critic.engine.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
        how = TrainingWorkerConfig("value_model", critic.model, critic.engine, critic.optim, critic.checkpoint)
        self.worker = TrainingWorker(config=how)
        self.worker.reset()
        self.worker.set_loss_fn(partial(value_loss, config=critic))
        return self.worker._query_dispatch_info("train")

    def values(self, data: Any) -> Any:
        return self.worker.infer_batch(data)

    def train(self, data: Any) -> Any:
        return self.worker.train_mini_batch(data)

    def save(self, folder: str, step: int) -> None:
        self.worker.save_checkpoint(folder, global_step=step)

    def load(self, folder: str) -> None:
        self.worker.load_checkpoint(folder)


class Reward(Model):
    def init_model(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.worker = RewardLoopWorker(self.config)

    def score(self, data: DataProto) -> list[dict]:
        return self.loop.run_until_complete(self.worker.compute_score_batch(data))


class ActorGroup:
    """The actors as verl's managers see a worker group."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self.workers, self.world_size = trainer.actors, len(trainer.actors)


class Trainer(BaseTrainer):
    def init(self) -> None:
        config, how = self.config, self.config.actor_rollout_ref
        self.RG_REWARD.init_model()
        self.dp_ranks = {name: getattr(self, name).init_model() for name in ("RG_CRITIC", "RG_REFERENCE", "RG_ACTOR")}
        group, model = ActorGroup(self), omega_conf_to_dataclass(how.model)
        servers = LLMServerManager.create(config=config, worker_group=group)
        self.agents = AgentLoopManager.create(config=config, llm_client=servers.get_client())
        engine = omega_conf_to_dataclass(how.rollout.checkpoint_engine)
        self.servers = CheckpointEngineManager(config=engine, actor_wg=group, replicas=servers.get_replicas())
        self.servers.sleep_replicas()
        data = create_rl_dataset(config.data.train_files, config.data, model.tokenizer, model.processor)
        self.prompts = DataLoader(data, config.data.train_batch_size, collate_fn=collate_fn, drop_last=True)
        self.folder = Path(config.trainer.default_local_dir)
        latest = self.folder / "latest"
        self.step = int(latest.read_text()) if latest.exists() else 0
        if self.step:
            self.RG_ACTOR.load(str(self.folder / f"actor-{self.step}"))
            self.RG_CRITIC.load(str(self.folder / f"critic-{self.step}"))

    def fit(self) -> None:
        self.RG_ACTOR.send_weights(self.step)
        for prompts in islice(self.prompts, self.step, self.config.trainer.total_training_steps):
            batch = self.with_advantages(self.generate(DataProto.from_single_dict(prompts)))
            critic = self.call("RG_CRITIC", "train", batch, **self.updates(self.config.critic))
            options = self.updates(self.config.actor_rollout_ref.actor)
            actor = self.call("RG_ACTOR", "train", batch, calculate_entropy=True, compute_loss=True, **options)
            self.step += 1
            self.RG_ACTOR.send_weights(self.step)
            print(f"step {self.step}: {tu.get(actor, 'metrics')} {tu.get(critic, 'metrics')}", flush=True)
            if self.step % self.config.trainer.save_freq == 0:
                self.RG_ACTOR.save(str(self.folder / f"actor-{self.step}"), self.step)
                self.RG_CRITIC.save(str(self.folder / f"critic-{self.step}"), self.step)
                (self.folder / "latest").write_text(str(self.step))

    def generate(self, batch: DataProto) -> DataProto:
        """Return a batch with `rollout.n` responses to each prompt."""
        rollout = self.config.actor_rollout_ref.rollout
        batch.non_tensor_batch["uid"] = np.array([str(uuid4()) for _ in range(len(batch))], dtype=object)
        batch.meta_info["global_steps"] = self.step + 1
        answered = self.agents.generate_sequences(batch.repeat(repeat_times=rollout.n, interleave=True))
        self.servers.sleep_replicas()
        answered.meta_info = {"temperature": rollout.temperature}
        answered.batch["response_mask"] = compute_response_mask(answered)
        return batch.repeat(repeat_times=rollout.n, interleave=True).union(answered)

    def with_advantages(self, batch: DataProto) -> DataProto:
        scores = [each["reward_score"] for each in chain(*self.RG_REWARD.score(batch.chunk(len(self.rewards))))]
        rewards = resolve_reward_manager_cls(self.config).assemble_rm_scores(batch, scores)
        batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = rewards
        options = {"compute_loss": False, "calculate_entropy": False}
        batch.batch["old_log_probs"] = self.tokens("log_probs", "RG_ACTOR", "log_probs", batch, **options)
        batch.batch["ref_log_prob"] = self.tokens("log_probs", "RG_REFERENCE", "log_probs", batch, **options)
        batch.batch["values"] = self.tokens("values", "RG_CRITIC", "values", batch, compute_loss=False)
        how = self.config.algorithm
        return compute_advantage(batch, how.adv_estimator, gamma=how.gamma, lam=how.lam, config=how)

    def updates(self, options: Any) -> dict:
        """Return the options of an actor's or a critic's mini-batches."""
        size = options.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        loader = {"epochs": options.ppo_epochs, "seed": options.data_loader_seed}
        return {"global_batch_size": size, "mini_batch_size": size, **loader, "dataloader_kwargs": {"shuffle": False}}

    def call(self, group: str, method: str, batch: DataProto, **options: Any) -> Any:
        """Call all workloads. Ranks of one data-parallel rank get the same rows, and one of them answers."""
        data, ranks = left_right_2_no_padding(batch.to_tensordict()), self.dp_ranks[group]
        tu.assign_non_tensor(data, **options)
        shares = tu.chunk_tensordict(data, max(ranks) + 1)
        results = getattr(getattr(self, group), method)([shares[rank] for rank in ranks])
        return tu.concat_tensordict([result for result in results if result is not None])

    def tokens(self, key: str, group: str, method: str, batch: DataProto, **options: Any) -> Any:
        """Return a value for each token of the responses."""
        values = tu.get(self.call(group, method, batch, **options), key)
        return no_padding_2_padding(values, left_right_2_no_padding(batch.to_tensordict())).float()


def job(options: dict) -> RLJobBuilder:
    builder = RLJobBuilder().device_per_node(sum(GPUS.values())).device_type("GPU").config(options).trainer(Trainer)
    roles = {"actor": Actor, "critic": Critic, "reference": Reference, "reward": Reward}
    for role, cls in roles.items():
        builder = getattr(builder, role)(cls).total(GPUS[role]).per_node(GPUS[role]).end()
    return builder


if __name__ == "__main__":
    print(job(OmegaConf.to_container(OmegaConf.load(sys.argv[1]))).build().submit(job_name="verl-ppo"))
    rlite.shutdown()
