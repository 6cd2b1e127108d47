"""Adapters that the real vLLM serves: several at once, several versions of one, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import ConfigError, WeightSyncError
from rlite.nn import LoraOptions
from rlite.types import GenerationHyperparameters, LLMRequest
from tests.integration.modules import POLICIES, make_batch, next_token_logprobs, num_counted, on_meta, token_loss
from tests.integration.test_adapter_sync import interrupted
from tests.integration.worlds import MARK, ray_session
from tests.tiny import build_model_dir
from tests.vllm.processes import servers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(840)]
PROMPTS = [[1, 2, 3], [200, 7, 91, 4, 77, 8], [5], [9, 9], [1, 2, 3, 4], [60, 61]]
SAMPLED = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "seed": 3}
ADAPTERS = {
    "wide": LoraOptions(rank=8, alpha=16.0),
    "narrow": LoraOptions(rank=2, alpha=2.0, target_modules=["q_proj", "v_proj"]),
    "mlp": LoraOptions(rank=5, alpha=3.0, target_modules=["layers.1.mlp.down_proj", "gate_proj"]),
}


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(2) as mark:
        yield
        assert servers(mark=MARK, value=mark) == [], "a released engine leaves no process"


def learn(engine: RliteTrainEngine, name: str) -> None:
    for seed in range(2):
        engine.forward_backward(make_batch([9, 4, 17, 2], seed), token_loss, num_counted, adapter=name)
        engine.optimizer_step(name, lr=2e-2)


def of_trainer(engine: RliteTrainEngine, ids: list[int], adapter: str | None) -> Tensor:
    row = torch.tensor([ids])
    batch = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    return engine.forward(batch, next_token_logprobs, adapter=adapter)[0, :-1]


@pytest.mark.nightly
def test_vllm_serves_adapters_as_they_are_trained(tmp_path: Path) -> None:
    path = build_model_dir(tmp_path / "qwen3", "qwen3", hidden=128)
    engine = RliteInferenceEngine(path, executor="vllm")
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    engine.build(data_parallel_size=1, max_model_len=256, max_num_seqs=8, dtype="float32", **lora)
    trainer = RliteTrainEngine(on_meta(POLICIES["qwen3"], path))
    trainer.build(data_parallel_size=1, colocate_with=engine)
    base = engine.generate(PROMPTS, SAMPLED)
    for name, adapter in ADAPTERS.items():
        trainer.add_adapter(name, adapter)
        learn(trainer, name)
        assert trainer.p2p_adapter_sync(engine, name).version == 1
    names: list[Any] = ["wide", "narrow", "mlp", None, "wide", "narrow"]
    together = engine.generate(PROMPTS, SAMPLED, adapter=names)
    for prompt, name, output in zip(PROMPTS, names, together, strict=True):
        made = output.outputs[0]
        expected = of_trainer(trainer, [*prompt, *made.token_ids], name)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=1e-5, rtol=0)
        (alone,) = engine.generate([prompt], SAMPLED, adapter=name)
        assert alone.outputs[0].token_ids == made.token_ids
    assert together[3].outputs[0].token_ids == base[3].outputs[0].token_ids
    (found,) = engine.prompt_logprobs([PROMPTS[1]], adapter="mlp")
    torch.testing.assert_close(torch.tensor(found), of_trainer(trainer, PROMPTS[1], "mlp"), atol=1e-5, rtol=0)

    gconfig = GenerationHyperparameters(max_new_tokens=150, ignore_eos=True)
    for number, on_inflight in enumerate(("continue", "keep"), start=1):
        trainer.save_adapter("wide", tmp_path / "before")
        requests = [
            LLMRequest(input_ids=[7, 8, 9 + index], gconfig=gconfig.new(seed=index), adapter=name)
            for index, name in enumerate(["wide", "narrow", None])
        ]

        def sync(how: Any = on_inflight) -> None:
            learn(trainer, "wide")
            trainer.p2p_adapter_sync(engine, "wide", on_inflight=how)

        answers = asyncio.run(interrupted(engine, requests, sync))
        versions = [sorted(set(answer.output_versions)) for answer in answers]
        assert versions == [[number, number + 1] if on_inflight == "continue" else [number], [1], [0]]
        trainer.load_adapter("before", tmp_path / "before")
        ids, start = [*answers[0].input_tokens, *answers[0].output_tokens], answers[0].input_len - 1
        old, new = (of_trainer(trainer, ids, name)[start:] for name in ("before", "wide"))
        expected = torch.where(torch.tensor(answers[0].output_versions) > number, new, old)
        torch.testing.assert_close(torch.tensor(answers[0].output_logprobs), expected, atol=1e-5, rtol=0)

    trainer.add_adapter("zero", ADAPTERS["narrow"])
    with pytest.raises(WeightSyncError, match=r"still serves nothing under this name: it changes no logit"):
        trainer.p2p_adapter_sync(engine, "zero")
    trainer.add_adapter("large", LoraOptions(rank=16))
    learn(trainer, "large")
    with pytest.raises(
        WeightSyncError, match=r"still serves nothing under this name: .*vLLM does not take the adapter"
    ):
        trainer.p2p_adapter_sync(engine, "large")
    with pytest.raises(ConfigError, match="one model has two writers"):
        trainer.p2p_weight_sync(engine)
    engine.remove_adapter("mlp")
    assert engine.adapters == {"wide": 3, "narrow": 1}
    assert len(engine.generate(PROMPTS, SAMPLED, adapter="wide")) == len(PROMPTS)
    trainer.release()
    engine.release()


def test_without_enable_lora_vllm_says_what_to_build(tmp_path: Path) -> None:
    path = build_model_dir(tmp_path / "qwen3", "qwen3", hidden=128)
    engine = RliteInferenceEngine(path, executor="vllm")
    with pytest.raises(ConfigError, match="enable_lora=True"):
        engine.load_adapter("a", tmp_path)
