"""Truncated rollouts with real engines: the trainer finds the log-probabilities of what was sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.rollout import LLMRequest, MultiTurnWorkflow, RolloutWorkflow, SingleTurnWorkflow, trajectory
from rlite.rollout.openai import AgentWorkflow
from rlite.trainer.model.modules import policy_module
from rlite.trainer.rl.objective import OwnLogprobs
from rlite.types import GenerationHyperparameters
from tests.integration.rewards import digits

ROWS = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(3) for b in range(3)]
SAMPLING = {"top_p": {"top_p": 0.9}, "top_k": {"top_k": 20}, "both": {"top_p": 0.8, "top_k": 30, "temperature": 0.7}}


class Ask(RolloutWorkflow):
    """One answer, asked for by hand."""

    def __init__(self, gconfig: GenerationHyperparameters) -> None:
        self.gconfig = gconfig

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        ids = byte_tokenizer()(data["messages"][0]["content"])["input_ids"]
        return trajectory(await engine.agenerate(LLMRequest(input_ids=ids, gconfig=self.gconfig)), reward=1.0)


async def agent(model: Any, data: dict[str, Any]) -> float:
    messages = list(data["messages"])
    for _ in range(2):
        answer = await model.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "?"}]
    return 1.0


@pytest.fixture(scope="module")
def engines(models: dict[str, Path]) -> Iterator[tuple[RliteInferenceEngine, RliteTrainEngine]]:
    rlite.init(num_devices=1, num_threads=1)
    inference, train = RliteInferenceEngine(models["qwen3"]), RliteTrainEngine(policy_module(str(models["qwen3"])))
    inference.build(max_model_len=256, max_num_seqs=16, dtype="float32")
    train.build(colocate_with=inference, param_dtype="float32", max_tokens_per_microbatch=300)
    yield inference, train
    rlite.shutdown()


def workflows(gconfig: GenerationHyperparameters) -> dict[str, RolloutWorkflow]:
    tokenizer = byte_tokenizer()
    return {
        "own": Ask(gconfig),
        "single": SingleTurnWorkflow(digits, gconfig, tokenizer),
        "turns": MultiTurnWorkflow(digits, gconfig, tokenizer, max_turns=2, solved=2.0),
        "agent": AgentWorkflow(agent, gconfig, tokenizer, max_length=256),
    }


@pytest.mark.parametrize("sampling", [*SAMPLING])
@pytest.mark.parametrize("kind", ["own", "single", "turns", "agent"])
def test_the_trainer_finds_the_sampled_log_probabilities_of_every_workflow(
    engines: tuple[RliteInferenceEngine, RliteTrainEngine], sampling: str, kind: str
) -> None:
    inference, train = engines
    gconfig = GenerationHyperparameters(max_new_tokens=16, **SAMPLING[sampling])
    batch = inference.rollout_batch(ROWS[:3], workflows(gconfig)[kind], group_size=2)
    written = batch["loss_mask"].bool()
    assert (batch["kept_counts"][written] > 0).all()
    assert not batch["kept_counts"][~written].any()
    found = train.forward(batch, OwnLogprobs(temperature=gconfig.temperature))
    assert (found - batch["logprobs"])[written].abs().max() < 1e-5
    without = train.forward(batch.exclude("kept_ids", "kept_counts"), OwnLogprobs(temperature=gconfig.temperature))
    assert (without - batch["logprobs"])[written].abs().max() > 0.05
    full = train.forward(batch, OwnLogprobs(temperature=gconfig.temperature, is_full=True))
    assert (full - without).abs().max() < 1e-6
