"""An actor with a loss of its own, on rollouts of its own workflow: it runs unchanged on every inference executor."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoTokenizer, Qwen2ForCausalLM

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.algorithms import gather_logprobs, next_token
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.rollout import GenerationHyperparameters, LLMRequest, LLMResponse, RewardFunction, RolloutWorkflow
from tests.contracts.executors import installed_executors
from tests.integration.modules import on_meta
from tests.integration.worlds import world
from tests.marks import nightly
from tests.tiny import build_model_dir

pytestmark = pytest.mark.slow
STEPS = 24
OFTEN = [name for name in installed_executors() if name != "pushing"]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", hidden=128)  # vLLM's smallest heads


def digit_reward(completions: str, **_: Any) -> float:
    """Return the share of digits in the completion: a signal that a random model can climb."""
    return sum(c.isdigit() for c in completions) / max(len(completions), 1)


class ReMaxWorkflow(RolloutWorkflow):
    """A sampled and a greedy completion at once; the reward is their difference."""

    def __init__(self, reward_fn: Callable[..., Any], gconfig: GenerationHyperparameters, tokenizer: Any) -> None:
        self.reward_fn = RewardFunction(reward_fn, in_process=True)
        self.gconfig = gconfig
        self.tokenizer = tokenizer

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        ids = self.tokenizer.apply_chat_template(
            data["messages"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        rid = uuid.uuid4().hex
        asked = [
            LLMRequest(rid=rid, input_ids=ids, gconfig=gconfig)
            for gconfig in (self.gconfig, self.gconfig.new(greedy=True))
        ]
        answers = await asyncio.gather(*map(engine.agenerate, asked))
        scores = await asyncio.gather(*(self._score(answer, data) for answer in answers))
        made, num_prompt = answers[0], len(ids)
        length = num_prompt + made.output_len
        return TensorDict(
            {
                "input_ids": torch.tensor([made.input_tokens + made.output_tokens]),
                "loss_mask": torch.tensor([[0] * num_prompt + [1] * made.output_len]),
                "logprobs": torch.tensor([[0.0] * num_prompt + made.output_logprobs]),
                "versions": torch.tensor([[-1] * num_prompt + made.output_versions]),
                "attention_mask": torch.ones(1, length, dtype=torch.bool),
                "rewards": torch.full((1, length), float(scores[0] - scores[1])),
                "sample_reward": torch.tensor([float(scores[0])]),
            },
            batch_size=[1],
        )

    async def _score(self, answer: LLMResponse, data: dict[str, Any]) -> float:
        return await self.reward_fn(
            prompt=self.tokenizer.decode(answer.input_tokens),
            completions=self.tokenizer.decode(answer.output_tokens),
            prompt_ids=answer.input_tokens,
            completion_ids=answer.output_tokens,
            **data,
        )


def reinforce_loss(logits: Tensor, data: dict[str, Any]) -> Tensor:
    labels = next_token(data["input_ids"], data["cu_seqlens"])
    mask = next_token(data["loss_mask"], data["cu_seqlens"]).bool()
    loss = -gather_logprobs(logits, labels) * data["rewards"]
    return torch.where(mask, loss, 0.0).sum() / mask.count_nonzero().clamp(min=1)


class ReinforceActor(RliteTrainEngine):
    """The backend's engine with the algorithm on top."""

    def train_reinforce(self, data: TensorDict) -> dict[str, float]:
        self.train()
        return self.train_batch(data, reinforce_loss, lambda x: x["loss_mask"].count_nonzero())


class Qwen(HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)


@torch.no_grad()
def drift(path: Path, engine: RliteTrainEngine, batch: TensorDict) -> float:
    """Largest difference between the engines' log-probabilities of the generated tokens."""
    reference = Qwen2ForCausalLM.from_pretrained(path).eval()
    reference.load_state_dict(engine.state_dict(), strict=False)
    logits = reference(batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits[:, :-1]
    found = gather_logprobs(logits, batch["input_ids"][:, 1:]) - batch["logprobs"][:, 1:]
    return float(found[batch["loss_mask"][:, 1:].bool()].abs().max())


@pytest.mark.parametrize("executor", [*OFTEN, *nightly("pushing")])
def test_an_actor_learns_on_rollouts_of_every_executor(executor: str, path: Path) -> None:
    serve = RliteInferenceEngine(path, executor=executor)
    serve.build(tensor_parallel_size=1, data_parallel_size=2)
    with init_empty_weights():
        engine = ReinforceActor(Qwen.from_pretrained(path))
        engine.build(tensor_parallel_size=2, data_parallel_size=1, colocate_with=serve, max_tokens_per_microbatch=512)
    gconfig = GenerationHyperparameters(max_new_tokens=12)
    workflow = ReMaxWorkflow(digit_reward, gconfig, AutoTokenizer.from_pretrained(path))
    items = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(8) for b in range(8)]
    batches = itertools.cycle([items[i : i + 16] for i in range(0, len(items), 16)])
    rewards = []
    for step in range(STEPS):
        batch = serve.rollout_batch(next(batches), workflow=workflow)
        generated = batch["loss_mask"].bool()
        assert batch.batch_size[0] == 16
        assert (batch["versions"][generated] == step).all()
        if step == 5:
            assert drift(path, engine, batch) < 1e-3
        rewards.append(batch["sample_reward"].mean().item())
        engine.train_reinforce(batch)
        engine.p2p_weight_sync(serve)
        assert serve.get_version() == step + 1
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5]), rewards
    engine.release()
    serve.release()


@pytest.mark.parametrize("executor", [*OFTEN, *nightly("pushing")])
def test_a_replica_of_two_workers_chooses_who_is_asked_and_who_answers(executor: str, path: Path) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    prompts = [[1, 2, 3], [200, 7, 91, 4, 77, 8], [5]]
    serve = RliteInferenceEngine(path, executor=executor)
    made = {}
    for size in (1, 2):
        serve.build(tensor_parallel_size=size, data_parallel_size=1, max_model_len=64)
        made[size] = [result.outputs[0].token_ids for result in serve.generate(prompts, greedy)]
        if serve.capabilities.has_prompt_logprobs:
            assert [len(found) for found in serve.prompt_logprobs(prompts)] == [2, 5, 0]
        engine = ReinforceActor(on_meta(Qwen, path))
        engine.build(tensor_parallel_size=size, data_parallel_size=1, colocate_with=serve)
        engine.p2p_weight_sync(serve, verify_checksums=True)
        assert [result.outputs[0].token_ids for result in serve.generate(prompts, greedy)] == made[size]
        engine.release()
        serve.release()
    assert made[1] == made[2]
