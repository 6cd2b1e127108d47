"""Adapters travel alone: what the embedded engine serves beside its base is what was trained."""

from __future__ import annotations

import asyncio
import json
import pickle
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
from rlite.runtime.replicas.adapters import AdapterWeights, Factors
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.objective import OwnLogprobs
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from rlite.types import GenerationHyperparameters, LLMRequest
from tests.adapters import ADAPTERS, PROMPTS, SAMPLED, assert_kept_versions, assert_served, interrupted, of_trainer
from tests.integration.modules import POLICIES, make_batch, num_counted, on_meta, token_loss
from tests.integration.rewards import digits
from tests.integration.worlds import world
from tests.tiny import build_model_dir

LORA = LoraOptions(rank=4, alpha=6.0)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


def trained(engines: list[Any], module: Any, size: int = 1, **options: Any) -> RliteTrainEngine:
    engine = RliteTrainEngine(module)
    engine.build(tensor_parallel_size=size, data_parallel_size=1, colocate_with=engines[:1], **options)
    engines.append(engine)
    return engine


def serving(engines: list[Any], path: Path, size: int = 1, copies: int = 1, **options: Any) -> RliteInferenceEngine:
    engine = RliteInferenceEngine(path)
    sizes = {"tensor_parallel_size": size, "data_parallel_size": copies}
    options = {"max_model_len": 128, **options}
    engine.build(**sizes, max_num_seqs=8, colocate_with=engines[:1], **options)
    engines.append(engine)
    return engine


def learn(engine: RliteTrainEngine, name: str, steps: int = 2) -> None:
    for seed in range(steps):
        engine.train_batch(make_batch([9, 4, 17, 2], seed + len(name)), token_loss, num_counted, adapter=name)
        engine.optimizer_step(name, lr=2e-2)


def with_adapters(
    engines: list[Any], path: Path, kind: str = "qwen2", size: int = 1, **options: Any
) -> RliteTrainEngine:
    engine = trained(engines, on_meta(POLICIES[kind], path), size, **options)
    for name, adapter in ADAPTERS.items():
        engine.add_adapter(name, adapter)
        engine.optimizer_step(name, lr=2e-2)
        learn(engine, name)
    return engine


@pytest.mark.parametrize(
    ("kind", "size", "options"),
    [("qwen2", 1, {}), ("qwen3", 2, {}), ("llama", 1, {"speculation": True}), ("qwen2", 2, {"dtype": "float64"})],
)
def test_three_adapters_in_one_batch_have_the_trainers_logprobs_and_equal_each_alone(
    engines: list[Any], models: dict[str, Path], kind: str, size: int, options: dict[str, Any]
) -> None:
    engine = serving(engines, models[kind], size, **options)
    trainer = with_adapters(engines, models[kind], kind)
    base = engine.generate(PROMPTS, SAMPLED)
    for name in ADAPTERS:
        report = trainer.p2p_adapter_sync(engine, name)
        assert (report.version, report.transport) == (1, "adapter")
    names: list[str | None] = ["wide", "narrow", "mlp", None, "wide", "narrow"]
    assert_served(trainer, engine, names)
    together = engine.generate(PROMPTS, SAMPLED, adapter=names)
    for prompt, name, output in zip(PROMPTS, names, together, strict=True):
        (alone,) = engine.generate([prompt], SAMPLED, adapter=name)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    assert together[3].outputs[0].token_ids == base[3].outputs[0].token_ids, "the base is as it was"
    assert together[0].outputs[0].token_ids != base[0].outputs[0].token_ids
    for name in (*ADAPTERS, None):
        (found,) = engine.prompt_logprobs([PROMPTS[1]], adapter=name)
        torch.testing.assert_close(torch.tensor(found), of_trainer(trainer, PROMPTS[1], name), atol=1e-5, rtol=0)


def test_equal_prompts_of_several_adapters_share_no_cache(engines: list[Any], models: dict[str, Path]) -> None:
    trainer, engine = with_adapters(engines, models["qwen2"]), serving(engines, models["qwen2"])
    for name in ADAPTERS:
        trainer.p2p_adapter_sync(engine, name)
    prompt, names = [*range(3, 80)], ["wide", None, "narrow", "mlp", "wide"]
    for _ in range(2):  # the second time, prefixes are known
        for name, output in zip(names, engine.generate([prompt] * 5, SAMPLED, adapter=names), strict=True):
            made = output.outputs[0]
            expected = of_trainer(trainer, [*prompt, *made.token_ids], name)[len(prompt) - 1 :]
            torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=1e-5, rtol=0)


def test_with_deterministic_engines_served_adapters_have_the_bits_of_training(
    engines: list[Any], models: dict[str, Path]
) -> None:
    trainer = with_adapters(engines, models["qwen3"], "qwen3", deterministic=True)
    engine = serving(engines, models["qwen3"], deterministic=True)
    for name in ADAPTERS:
        trainer.p2p_adapter_sync(engine, name)
    names: list[Any] = ["wide", "narrow", "mlp", None, "wide", "narrow"]
    for prompt, name, output in zip(PROMPTS, names, engine.generate(PROMPTS, SAMPLED, adapter=names), strict=True):
        made = output.outputs[0]
        row = torch.tensor([[*prompt, *made.token_ids]])
        batch = {"input_ids": row, "attention_mask": torch.ones_like(row)}
        found = trainer.forward(batch, OwnLogprobs(), adapter=name)[0, len(prompt) :]
        assert made.logprobs == found.tolist(), name


def test_with_deterministic_engines_a_modules_own_adapter_has_the_bits_of_training(
    engines: list[Any], models: dict[str, Path]
) -> None:
    module = policy_module(models["qwen3"], constant(), LORA)
    trainer = trained(engines, module, deterministic=True)
    engine, short = (serving(engines, models["qwen3"], deterministic=True, max_model_len=n) for n in (128, 9))
    trainer.train_batch(make_batch([9, 4, 17, 2]), token_loss, num_counted)
    trainer.p2p_adapter_sync(engine)
    assert trainer.p2p_adapter_sync(short).version == 1, "an engine of short sequences takes the adapter, too"
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, SAMPLED), strict=True):
        made = output.outputs[0]
        row = torch.tensor([[*prompt, *made.token_ids]])
        batch = {"input_ids": row, "attention_mask": torch.ones_like(row)}
        assert made.logprobs == trainer.forward(batch, OwnLogprobs())[0, len(prompt) :].tolist()
    engine.remove_adapter(None)
    trainer.p2p_weight_sync(engine)
    merged = engine.generate(PROMPTS, SAMPLED)[1].outputs[0]
    row = torch.tensor([[*PROMPTS[1], *merged.token_ids]])
    found = trainer.forward({"input_ids": row, "attention_mask": torch.ones_like(row)}, OwnLogprobs())
    assert merged.logprobs != found[0, len(PROMPTS[1]) :].tolist(), "so runs refuse it"


def test_only_the_adapter_travels(engines: list[Any], models: dict[str, Path]) -> None:
    trainer = trained(engines, policy_module(models["qwen2"], constant(), LoraOptions(rank=16)), size=2)
    engine = serving(engines, models["qwen2"])
    for _ in range(2):
        trainer.train_batch(make_batch([9, 4]), token_loss, num_counted)
    report = trainer.p2p_adapter_sync(engine)
    (weights,) = [held.weights for held in engine._held.values()]
    num_bytes = sum(tensor.nbytes for pair in weights.factors.values() for tensor in pair)
    assert report.num_bytes == num_bytes
    assert len(pickle.dumps(weights)) <= 1.1 * num_bytes, "what a call to a worker holds"
    assert report.num_bytes < 0.4 * sum(tensor.nbytes for tensor in trainer.state_dict().values())
    assert (report.version, engine.get_version()) == (1, 1)
    assert_served(trainer, engine, [None] * len(PROMPTS))


def constant(lr: float = 2e-2) -> OptimizerOptions:
    return OptimizerOptions(lr=lr, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=10)


@pytest.mark.parametrize("on_inflight", ["continue", "keep"])
def test_requests_in_flight_go_on_with_the_next_version_or_keep_theirs(
    engines: list[Any], models: dict[str, Path], tmp_path: Path, on_inflight: Any
) -> None:
    # long answers: the sync has to end before they do, on a busy machine, too
    trainer, engine = with_adapters(engines, models["qwen2"]), serving(engines, models["qwen2"], max_model_len=1024)
    trainer.p2p_adapter_sync(engine, "wide")
    trainer.p2p_adapter_sync(engine, "narrow")
    trainer.save_adapter("wide", tmp_path / "before")
    learn(trainer, "wide")
    gconfig = GenerationHyperparameters(max_new_tokens=1000, ignore_eos=True)
    requests = [
        LLMRequest(input_ids=[7, 8, 9 + index], gconfig=gconfig.new(seed=index), adapter=name)
        for index, name in enumerate(["wide", "narrow", "wide", None])
    ]

    def sync() -> None:
        assert trainer.p2p_adapter_sync(engine, "wide", on_inflight=on_inflight).version == 2

    answers = asyncio.run(interrupted(engine, requests, sync))
    assert all(answer.output_len == 1000 for answer in answers)
    versions = [sorted(set(answer.output_versions)) for answer in answers]
    assert versions[1] == [1]
    assert versions[3] == [0]
    assert versions[0] == versions[2] == ([1] if on_inflight == "keep" else [1, 2])
    trainer.load_adapter("before", tmp_path / "before")
    for answer in (answers[0], answers[2]):
        ids, start = [*answer.input_tokens, *answer.output_tokens], answer.input_len - 1
        old, new = (of_trainer(trainer, ids, name)[start:] for name in ("before", "wide"))
        is_new = torch.tensor(answer.output_versions) == 2
        expected = torch.where(is_new, new, old)
        torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, atol=1e-5, rtol=0)
    assert engine.adapters == {"wide": 2, "narrow": 1}
    assert_served(trainer, engine, ["wide", "narrow", None, None, "wide", "narrow"])


@pytest.mark.nightly
def test_as_many_versions_are_served_as_requests_need(engines: list[Any], models: dict[str, Path]) -> None:
    trainer, engine = with_adapters(engines, models["qwen2"]), serving(engines, models["qwen2"], max_model_len=2048)
    trainer.add_adapter("wider", ADAPTERS["wide"], seed=1)
    learn(trainer, "wider")
    assert_kept_versions(trainer, engine, [*ADAPTERS, "wider"], 2000)


def test_a_sync_that_fails_leaves_the_old_version_served_and_says_so(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    engine = serving(engines, models["qwen2"], copies=2)
    trainer = with_adapters(engines, models["qwen2"])
    trainer.p2p_adapter_sync(engine, "wide", name="mine")
    before = engine.generate(PROMPTS, SAMPLED, adapter="mine")
    trainer.add_adapter("zero", ADAPTERS["narrow"])
    with pytest.raises(WeightSyncError, match=r"still serves version 1: it changes no logit"):
        trainer.p2p_adapter_sync(engine, "zero", name="mine")
    with pytest.raises(WeightSyncError, match="still serves nothing under this name"):
        trainer.p2p_adapter_sync(engine, "zero")
    assert trainer.p2p_adapter_sync(engine, "zero", may_be_zero=True).version == 1
    odd = AdapterWeights(2, 2.0, {"model.layers.0.self_attn.q_proj": Factors(torch.ones(2, 7), torch.ones(64, 2))})
    with pytest.raises(WeightSyncError, match=r"still serves version 1: .*belongs to another base model"):
        engine.take_adapter("mine", odd, trainer.name)
    after = engine.generate(PROMPTS, SAMPLED, adapter="mine")
    assert [output.outputs[0] for output in after] == [output.outputs[0] for output in before]
    other = trained(engines, on_meta(POLICIES["qwen2"], models["qwen2"]))
    other.add_adapter("mine", ADAPTERS["wide"])
    with pytest.raises(ConfigError, match="is written by"):
        other.p2p_adapter_sync(engine, "mine", may_be_zero=True)
    with pytest.raises(ConfigError, match="one model has two writers"):
        trainer.p2p_weight_sync(engine)
    with pytest.raises(ConfigError, match="no adapter 'min'; did you mean 'mine'"):
        engine.generate(PROMPTS, SAMPLED, adapter="min")
    engine.remove_adapter("mine")
    engine.remove_adapter("zero")
    assert engine.adapters == {}


def test_an_adapter_of_another_base_is_refused(engines: list[Any], models: dict[str, Path], tmp_path: Path) -> None:
    other = build_model_dir(tmp_path / "other", "qwen2", hidden=64, initializer_range=0.11)
    trainer, engine = with_adapters(engines, models["qwen2"]), serving(engines, other)
    with pytest.raises(WeightSyncError, match="belongs to another base model"):
        trainer.p2p_adapter_sync(engine, "wide")
    trainer.save_adapter("wide", tmp_path / "wide")
    with pytest.raises(WeightSyncError, match="belongs to another base model"):
        engine.load_adapter("wide", tmp_path / "wide")
    theirs = trained(engines, on_meta(POLICIES["qwen2"], other))
    with pytest.raises(ConfigError, match="belongs to another base model"):
        theirs.load_adapter("wide", tmp_path / "wide")
    assert theirs.adapters == {}
    # a base that was trained is no longer that of the checkpoint, until it is synced
    theirs.train_batch(make_batch([9, 4]), token_loss, num_counted)
    theirs.add_adapter("mine", ADAPTERS["narrow"])
    learn(theirs, "mine")
    with pytest.raises(WeightSyncError, match="belongs to another base model"):
        theirs.p2p_adapter_sync(engine, "mine")
    theirs.p2p_weight_sync(engine)
    theirs.p2p_adapter_sync(engine, "mine")
    assert_served(theirs, engine, ["mine", None] * 3)


@pytest.mark.slow
def test_a_run_that_syncs_adapters_equals_a_run_that_syncs_merged_weights(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    sampling, lines = SamplingOptions(max_new_tokens=8), []
    for adapter_sync in (True, False):
        options = PpoConfig(
            actor=ActorOptions(model_name=str(models["qwen3"]), lr=1e-2, lora=LORA),
            train_data=PromptOptions(prompts_per_rollout=8, responses_per_prompt=4),
            rollout=RolloutOptions(
                train_sampling_params=sampling, max_model_len=64, max_num_seqs=32, adapter_sync=adapter_sync
            ),
            trainer=TrainerOptions(save_dir=str(tmp_path / str(adapter_sync)), total_steps=3),
        )
        rows = [{"messages": [{"role": "user", "content": f"{number}?"}]} for number in range(8)]
        made = PpoTrainer(options, SingleTurnWorkflow(digits, sampling.gconfig(), byte_tokenizer()), rows, ())
        assert made.engines.sends_adapter is False, "it is decided when the engines are built"
        made.fit()
        assert made.engines.sends_adapter is adapter_sync
        made.engines.rollout.release()
        made.engines.actor.release()
        text = (tmp_path / str(adapter_sync) / "metrics.jsonl").read_text()
        lines.append([json.loads(line) for line in text.splitlines()])
    for alone, merged in zip(*lines, strict=True):
        assert alone["loss"] == pytest.approx(merged["loss"], abs=1e-5)
        assert alone["reward"] == pytest.approx(merged["reward"], abs=1e-6)
        assert alone["grad_norm"] == pytest.approx(merged["grad_norm"], rel=1e-3)
        assert alone["logprob_drift"] < 1e-5
        assert alone["sync_bytes"] < 0.2 * merged["sync_bytes"]
