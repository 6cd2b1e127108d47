"""Truncated rollouts with vLLM: the trainer finds the log-probabilities of what was sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.rollout import MultiTurnWorkflow
from rlite.trainer.model.modules import policy_module
from rlite.trainer.rl.objective import OwnLogprobs
from rlite.types import GenerationHyperparameters
from tests.integration.rewards import digits
from tests.marks import nightly
from tests.tiny import build_model_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(840)]
ROWS = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(2) for b in range(2)]
SAMPLING = {"top_p": {"top_p": 0.9}, "top_k": {"top_k": 20}, "both": {"top_p": 0.8, "top_k": 30, "temperature": 0.7}}


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(device="cpu", num_devices=2, launcher="ray", num_threads=1)
    yield
    rlite.shutdown()


def rollouts(engine: RliteInferenceEngine, **sampling: Any) -> TensorDict:
    gconfig = GenerationHyperparameters(max_new_tokens=12, **sampling)
    workflow = MultiTurnWorkflow(digits, gconfig, byte_tokenizer(), max_turns=2, solved=2.0)
    return engine.rollout_batch(ROWS, workflow, group_size=2)


@pytest.mark.parametrize("size", [1, *nightly(2)])
def test_the_trainer_finds_the_sampled_log_probabilities(size: int, tmp_path: Path) -> None:
    path = build_model_dir(tmp_path / "qwen3", "qwen3", tie=True, hidden=128)
    engine = RliteInferenceEngine(path, executor="vllm")
    engine.build(tensor_parallel_size=size, data_parallel_size=1, max_model_len=256, max_num_seqs=8, dtype="float32")
    train = RliteTrainEngine(policy_module(str(path)))
    train.build(tensor_parallel_size=size, data_parallel_size=1, colocate_with=engine, max_tokens_per_microbatch=300)
    for sampling in SAMPLING.values():
        batch = rollouts(engine, **sampling)
        written = batch["loss_mask"].bool()
        assert (batch["kept_counts"][written] > 0).all()
        assert not batch["kept_counts"][~written].any()
        if "top_p" not in sampling:
            assert set(batch["kept_counts"][written].tolist()) == {sampling["top_k"]}
        found = train.forward(batch, OwnLogprobs(temperature=sampling.get("temperature", 1.0)))
        assert (found - batch["logprobs"])[written].abs().max() < 1e-5
    whole = rollouts(engine)
    assert not whole["kept_counts"].any() if "kept_counts" in whole else True
