"""OpenRLHF's PPO under the control plane: a role for each of its worker classes, and its order of calls.

    python examples/control/openrlhf_ppo.py OPTIONS.yaml

OPTIONS.yaml holds all options of OpenRLHF's train_ppo_ray, nested by the dots of their names. The example is written
for OpenRLHF 0.11.2 with a critic and a KL penalty in the reward. It needs OpenRLHF's own environment with DeepSpeed,
vLLM and 8 GPUs; docs/control.md says what of it has never run.
"""

import asyncio
import json
import sys
import threading
from itertools import chain
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf
from openrlhf.models.utils import compute_approx_kl, masked_mean
from openrlhf.trainer.ppo_trainer import prepare_datasets
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator, _collect_prompt_batch
from openrlhf.trainer.ray.launcher import ReferenceModelActor, RewardModelActor
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.trainer.ray.ppo_critic import CriticModelActor
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
from openrlhf.utils.utils import get_strategy, get_tokenizer
from vllm import SamplingParams

import rlite
from rlite.control import BaseTrainer, BaseWorkload, RLJobBuilder, trainer_invocation

GPUS = {"actor": 2, "critic": 2, "rollout": 2, "reference": 1, "reward": 1}


def strategy_of(config: Any) -> Any:
    """Return OpenRLHF's strategy. Its `args` are the job's options as OpenRLHF reads them: args.actor.optim."""
    text = json.dumps(OmegaConf.to_container(config))
    return get_strategy(json.loads(text, object_hook=lambda options: SimpleNamespace(**options)))


def plain(cls: Any) -> Any:
    """Return the class under OpenRLHF's `@ray.remote`: the control plane makes the processes."""
    return cls.__ray_metadata__.modified_class.__ray_actor_class__


class Model(BaseWorkload):
    worker_class: Any

    def __init__(self, master_handle: Any, config: Any) -> None:
        super().__init__(master_handle, config)
        self.strategy = strategy_of(config)
        self.args = self.strategy.args
        address, port = self.torch_master_addr, self.torch_master_port
        self.worker = plain(self.worker_class)(self.world_size, self.rank, address, port)

    def forward(self, samples: list) -> list:
        return [self.worker.forward(each.sequences, each.action_mask, each.attention_mask) for each in samples]


class Actor(Model):
    worker_class = PolicyModelActor

    @trainer_invocation(auto_shard=False)
    def init_model(self, max_steps: int, engines: list) -> None:
        name = self.args.actor.model_name_or_path
        self.worker.init_model_from_pretrained(self.strategy, name, max_steps=max_steps, vllm_engines=engines)

    def train(self, samples: list, kl_coef: float) -> dict:
        for sample in samples:
            self.worker.append(sample)
        return self.worker.fit(kl_ctl=kl_coef)

    def send_weights(self) -> None:
        self.worker.broadcast_to_vllm()

    def save(self, tag: str, states: dict) -> None:
        self.worker.save_checkpoint(tag, client_states=states)

    @trainer_invocation(target="RANK0")
    def restored(self) -> dict:
        return self.worker.get_checkpoint_states()


class Critic(Model):
    worker_class = CriticModelActor

    def init_model(self, max_steps: int) -> None:
        self.worker.init_model_from_pretrained(self.strategy, self.args.critic.model_name_or_path, max_steps)

    def train(self, samples: list) -> dict:
        for sample in samples:
            self.worker.append(sample)
        return self.worker.fit()

    def save(self, tag: str) -> None:
        self.worker.save_checkpoint(tag)


class Reference(Model):
    worker_class = ReferenceModelActor

    def init_model(self) -> None:
        self.worker.init_model_from_pretrained(self.strategy, self.args.actor.model_name_or_path)


class Reward(Model):
    worker_class = RewardModelActor

    def init_model(self) -> None:
        self.worker.init_model_from_pretrained(self.strategy, self.args.reward.model_name_or_path)

    def forward(self, samples: list) -> list:
        return [self.worker.forward(each.sequences, each.attention_mask, pad_sequence=True) for each in samples]


class Rollout(BaseWorkload):
    """A vLLM engine of OpenRLHF, whose coroutines run in a thread. An actor that sends weights calls three methods."""

    worker_class = RolloutRayActor

    def init_model(self) -> None:
        strategy = strategy_of(self.config)
        self.args, name = strategy.args, strategy.args.actor.model_name_or_path
        self.tokenizer = get_tokenizer(name, None, "left", strategy)
        self.reader = SamplesGenerator(strategy, None, None, self.tokenizer, [])
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        engine = {"model": name, "seed": self.args.train.seed + self.rank, "max_model_len": self.args.data.max_len}
        extension = "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap"
        self.worker = object.__new__(plain(self.worker_class))
        self._wait(self.worker.__init__(num_gpus=1, worker_extension_cls=extension, dtype="bfloat16", **engine))

    def generate(self, prompts: list, labels: list) -> list:
        """Return a sample for each completion."""
        return self._wait(self._generate(prompts, labels))

    def init_process_group(self, *args: Any, **kwargs: Any) -> Any:
        return self._wait(self.worker.init_process_group(*args, **kwargs))

    def update_weight(self, *args: Any, **kwargs: Any) -> Any:
        return self._wait(self.worker.update_weight(*args, **kwargs))

    def reset_prefix_cache(self) -> None:
        self._wait(self.worker.reset_prefix_cache())

    async def _generate(self, prompts: list, labels: list) -> list:
        how, longest = self.args.rollout, self.args.data.max_len
        sampling = SamplingParams(temperature=how.temperature, top_p=how.top_p, max_tokens=how.max_new_tokens)
        calls = [
            self.worker.generate_responses(prompt, label, sampling, longest, self.tokenizer, how.n_samples_per_prompt)
            for prompt, label in zip(prompts, labels, strict=True)
        ]
        responses = chain.from_iterable(await asyncio.gather(*calls))
        return [self.reader._process_response_into_experience(each, max_len=longest) for each in responses]

    def _wait(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result()


class Trainer(BaseTrainer):
    def init(self) -> None:
        strategy = strategy_of(self.config)
        self.args = strategy.args
        tokenizer = get_tokenizer(self.args.actor.model_name_or_path, None, "left", strategy)
        self.kl = FixedKLController(self.args.algo.kl.init_coef)
        self.maker = RemoteExperienceMaker(None, None, None, None, self.kl, strategy, tokenizer)
        self.prompts, _, max_steps = prepare_datasets(strategy, tokenizer)
        for group in (self.RG_ROLLOUT, self.RG_REFERENCE, self.RG_REWARD):
            group.init_model()
        self.RG_ACTOR.init_model(max_steps, self.rollouts)
        self.RG_CRITIC.init_model(max_steps)
        restored = self.RG_ACTOR.restored()
        self.step = restored.get("step", 0)
        if restored:
            self.prompts.load_state_dict(restored["prompts"])
            self.RG_ACTOR.send_weights()

    def fit(self) -> None:
        prompts = iter(self.prompts)
        while (batch := _collect_prompt_batch(prompts, self.args.rollout.batch_size))[0]:
            parts = self.RG_ROLLOUT.generate(rlite.NeedParallel(batch[0]), rlite.NeedParallel(batch[1]))
            samples = self.make_experience(self.maker.split_rollout_samples(list(chain(*parts))))
            critic = self.RG_CRITIC.train(rlite.NeedParallel(samples))[0]
            actor = self.RG_ACTOR.train(rlite.NeedParallel(samples), self.kl.value)[0]
            self.RG_ACTOR.send_weights()
            self.step += 1
            print(f"step {self.step}: {actor | critic}", flush=True)
            if self.step % self.args.ckpt.save_steps == 0:
                self.RG_CRITIC.save(f"global_step{self.step}")
                states = {"step": self.step, "prompts": self.prompts.state_dict()}
                self.RG_ACTOR.save(f"global_step{self.step}", states)

    def make_experience(self, samples: list) -> list:
        """Return the samples with advantages."""
        groups = (self.RG_REWARD, self.RG_ACTOR, self.RG_REFERENCE, self.RG_CRITIC)
        answers = [chain(*group.forward(rlite.NeedParallel(samples))) for group in groups]
        for sample, rewards, log_probs, reference, values in zip(samples, *answers, strict=True):
            kl = compute_approx_kl(log_probs, reference, kl_estimator=self.args.algo.kl.estimator)
            sample.rewards, sample.action_log_probs, sample.values, sample.kl = rewards, log_probs, values, kl
            sample.info |= {"reward": rewards, "kl": masked_mean(kl, sample.action_mask, dim=-1)}
        return self.maker.compute_advantages_and_returns(samples)


def job(options: dict) -> RLJobBuilder:
    builder = RLJobBuilder().device_per_node(sum(GPUS.values())).device_type("GPU").config(options).trainer(Trainer)
    roles = {"actor": Actor, "critic": Critic, "rollout": Rollout, "reference": Reference, "reward": Reward}
    for role, cls in roles.items():
        builder = getattr(builder, role)(cls).total(GPUS[role]).per_node(GPUS[role]).end()
    return builder


if __name__ == "__main__":
    print(job(OmegaConf.to_container(OmegaConf.load(sys.argv[1]))).build().submit(job_name="openrlhf-ppo"))
    rlite.shutdown()
