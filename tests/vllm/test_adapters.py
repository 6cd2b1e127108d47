"""Adapters that the real vLLM serves: several at once, several versions of one, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError, WeightSyncError
from rlite.nn import LoraOptions
from rlite.rollout.workflow import SingleTurnWorkflow
from rlite.services.console.sinks import read_metrics
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from rlite.types import GenerationHyperparameters, LLMRequest
from tests.adapters import (
    ADAPTERS,
    PROMPTS,
    SAMPLED,
    assert_base_after_removal,
    assert_kept_versions,
    assert_served,
    interrupted,
    of_trainer,
)
from tests.integration.modules import POLICIES, make_batch, num_counted, on_meta, token_loss
from tests.integration.rewards import digits
from tests.integration.worlds import MARK, ray_session
from tests.tiny import build_model_dir
from tests.vllm.processes import servers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(840)]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(2) as mark:
        yield
        assert servers(mark=MARK, value=mark) == [], "a released engine leaves no process"


def learn(engine: RliteTrainEngine, name: str) -> None:
    for seed in range(2):
        engine.forward_backward(make_batch([9, 4, 17, 2], seed), token_loss, num_counted, adapter=name)
        engine.optimizer_step(name, lr=2e-2)


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
    assert_served(trainer, engine, names)
    for prompt, name, output in zip(PROMPTS, names, together, strict=True):
        (alone,) = engine.generate([prompt], SAMPLED, adapter=name)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
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
    with pytest.raises(ConfigError, match="rank 16 of an adapter is above max_lora_rank=8"):
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


@pytest.mark.nightly
def test_vllm_serves_as_many_versions_as_requests_need(tmp_path: Path) -> None:
    path = build_model_dir(tmp_path / "qwen3", "qwen3", hidden=128)
    engine = RliteInferenceEngine(path, executor="vllm")
    lora = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8}
    engine.build(data_parallel_size=1, max_model_len=1024, max_num_seqs=8, dtype="float32", **lora)
    trainer = RliteTrainEngine(on_meta(POLICIES["qwen3"], path))
    trainer.build(data_parallel_size=1, colocate_with=engine)
    for name in ("a", "b", "c", "d"):
        trainer.add_adapter(name, ADAPTERS["wide"], seed=ord(name))
        learn(trainer, name)
    assert_kept_versions(trainer, engine, ["a", "b", "c", "d"], 900)
    engine.remove_adapter("kept")
    assert_base_after_removal(engine, 128)
    trainer.release()
    engine.release()


def lora_run(path: Path, folder: Path, lora: LoraOptions | None, max_loras: int = 2, **trainer: Any) -> PpoTrainer:
    sampling = SamplingOptions(max_new_tokens=8)
    options = PpoConfig(
        actor=ActorOptions(model_name=str(path), lr=1e-2, lora=lora),
        train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=2),
        rollout=RolloutOptions(
            executor="vllm",
            executor_options={"enable_lora": True, "max_lora_rank": 8, "max_loras": max_loras},
            train_sampling_params=sampling,
            max_model_len=64,
            max_num_seqs=8,
            dtype="float32",
        ),
        trainer=TrainerOptions(save_dir=str(folder), total_steps=3, **trainer),
    )
    rows = [{"messages": [{"role": "user", "content": f"{number}?"}]} for number in range(8)]
    return PpoTrainer(options, SingleTurnWorkflow(digits, sampling.gconfig(), byte_tokenizer()), rows, ())


@pytest.mark.nightly
def test_a_run_with_vllm_sends_the_adapter_alone(tmp_path: Path) -> None:
    path = build_model_dir(tmp_path / "qwen3", "qwen3", hidden=128)
    made = lora_run(path, tmp_path / "run", LoraOptions(rank=8))
    made.fit()
    assert made.engines.sends_adapter
    made.engines.rollout.release()
    made.engines.actor.release()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["logprob_drift"] < 1e-4 for line in lines)
    assert lines[-1]["sync_bytes"] < 0.3 * (path / "model.safetensors").stat().st_size


def test_a_run_whose_vllm_takes_adapters_alone_is_refused_if_it_needs_whole_weights(tmp_path: Path) -> None:
    path = build_model_dir(tmp_path / "qwen3", "qwen3", hidden=128)
    with pytest.raises(ConfigError, match=r"vLLM wraps its layers; .* needs a policy .*actor\.lora is not set"):
        lora_run(path, tmp_path / "run", None)
    with pytest.raises(ConfigError, match=r"trainer\.evaluate=snapshot: with enable_lora .*; use in_turns"):
        lora_run(path, tmp_path / "run", LoraOptions(rank=8), evaluate="snapshot")
    with pytest.raises(ConfigError, match="max_loras=1, vLLM's default, lets the next version wait"):
        lora_run(path, tmp_path / "run", LoraOptions(rank=8), max_loras=1)
    with pytest.raises(ConfigError, match="rank 16 of an adapter is above max_lora_rank=8"):
        lora_run(path, tmp_path / "run", LoraOptions(rank=16))
    assert not (tmp_path / "run").exists()
