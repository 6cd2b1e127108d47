"""Adapters on real processes: what they train, what is served, and what others open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.config import load
from rlite.data.sft import preference_rows, sft_rows
from rlite.engine.weights import Transport, sync_weights
from rlite.errors import ConfigError
from rlite.nn import LoraOptions
from rlite.rollout.workflow import SingleTurnWorkflow
from rlite.trainer.dpo import DpoTrainer
from rlite.trainer.model.modules import critic_module, policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.objective import OwnLogprobs
from rlite.trainer.rl.options import ActorOptions, AdvantageOptions, KlOptions, PpoConfig, PromptOptions, RolloutOptions
from rlite.trainer.rm import RmTrainer
from rlite.trainer.sft import SftTrainer
from rlite.trainer.supervised_options import DpoConfig, RmConfig, SftConfig
from tests.integration.modules import make_batch, next_token_logprobs, num_counted, token_loss
from tests.integration.rewards import digits
from tests.integration.worlds import world

LORA = LoraOptions(rank=4, alpha=6.0)
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PROMPTS = [[1, 2, 3], [200, 7, 91, 4, 77, 8], [5]]
TRAINERS: dict[str, Any] = {"sft": (SftConfig, SftTrainer), "rm": (RmConfig, RmTrainer), "dpo": (DpoConfig, DpoTrainer)}
IDS = torch.tensor([[11, 12, 13, 200, 7, 91, 4, 77, 8]])


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


def optimizer(lr: float = 2e-2) -> OptimizerOptions:
    return OptimizerOptions(lr=lr, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=10)


def build(engines: list[Any], module: Any, size: int = 1, copies: int = 1, **options: Any) -> RliteTrainEngine:
    engine = RliteTrainEngine(module)
    engine.build(tensor_parallel_size=size, data_parallel_size=copies, colocate_with=engines[:1], **options)
    engines.append(engine)
    return engine


def train(engine: RliteTrainEngine, loss: Any = token_loss, steps: int = 3) -> list[float]:
    batch = make_batch([9, 4, 7, 6, 3])
    return [engine.train_batch(batch, loss, num_counted)["loss"] for _ in range(steps)]


def score_loss(scores: Tensor, data: dict[str, Any]) -> Tensor:
    return ((scores - 1) ** 2 * data["loss_mask"]).sum() / data["loss_mask"].sum()


@pytest.mark.parametrize(("size", "copies"), [(1, 1), (2, 1), (1, 2)])
def test_training_changes_adapted_weights_by_their_adapters_and_nothing_else(
    engines: list[Any], models: dict[str, Path], tmp_path: Path, size: int, copies: int
) -> None:
    engine = build(engines, policy_module(models["qwen2"], optimizer(), LORA), size, copies)
    before = engine.state_dict()
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in load_file(models["qwen2"] / "model.safetensors").items()
    )
    losses = train(engine)
    assert losses[-1] < losses[0] - 0.1
    engine.save(tmp_path)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(".lora_A." in name or ".lora_B." in name for name in adapter)
    num_adapted = 0
    for name, tensor in engine.state_dict().items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        expected = before[name]
        if name.endswith(".weight") and f"{layer}.lora_B.weight" in adapter:
            expected = expected + 6 / 4 * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
            num_adapted += not torch.equal(tensor, before[name])
            torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-6)
        else:
            assert torch.equal(tensor, expected), name
    assert num_adapted == 14
    held = sum(part["optimizer"] for part in engine.memory_bytes()) / copies
    assert held == pytest.approx(2 * sum(tensor.nbytes for tensor in adapter.values()), rel=0.02), "AdamW's two moments"


@pytest.mark.parametrize(
    ("kind", "size", "transport", "options"),
    [
        ("qwen3", 1, "auto", {}),
        ("llama", 1, "auto", {"compute_dtype": "bfloat16"}),
        ("qwen3", 2, "shared", {"gradient_checkpointing": True}),
        ("llama", 2, "gathered", {"tp_size": 2}),
        ("qwen2", 2, "broadcast", {}),
        ("qwen2", 2, "auto", {"tp_size": 2, "gradient_checkpointing": True}),
    ],
)
def test_served_and_exported_adapters_equal_the_trained_model(
    engines: list[Any],
    models: dict[str, Path],
    tmp_path: Path,
    kind: str,
    size: int,
    transport: Transport,
    options: dict[str, Any],
) -> None:
    path = models[kind]
    engine = build(engines, policy_module(path, optimizer(), LORA), size=size, **options)
    served = RliteInferenceEngine(path)
    served.build(tensor_parallel_size=size, max_model_len=64, max_num_seqs=4, colocate_with=engines[:1])
    engines.append(served)
    untrained = [output.outputs[0].token_ids for output in served.generate(PROMPTS, GREEDY)]
    train(engine)
    sync_weights(engine, served, "continue", verify_checksums=True, transport=transport)
    engine.save(tmp_path / "latest")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "latest").eval()
    base = AutoModelForCausalLM.from_pretrained(path)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "latest" / "adapter").eval()
    assert adapted.active_peft_config.base_model_name_or_path == str(path)
    with torch.no_grad():
        torch.testing.assert_close(adapted(IDS).logits, merged(IDS).logits, atol=1e-4, rtol=0)
        outputs = [output.outputs[0] for output in served.generate(PROMPTS, GREEDY)]
        assert [output.token_ids for output in outputs] != untrained
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            made = slice(len(prompt) - 1, -1)
            logprobs = merged(torch.tensor([prompt + output.token_ids])).logits[0, made].log_softmax(-1)
            assert logprobs.argmax(-1).tolist() == output.token_ids
            expected = logprobs.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)
        # and what the engine itself computes, with its adapters apart
        scored = engine.forward({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, next_token_logprobs)
        expected = merged(IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
        tolerance = 1e-4 if engine.options.compute_dtype is None else 0.1
        torch.testing.assert_close(scored[:, :-1].float(), expected, atol=tolerance, rtol=0)


def test_every_sharding_trains_the_same_adapters(engines: list[Any], models: dict[str, Path], tmp_path: Path) -> None:
    adapters = []
    for number, placement in enumerate([{}, {"size": 2}, {"copies": 2}, {"size": 2, "sp_size": 2}]):
        module = policy_module(models["qwen2"], optimizer(), LORA)
        engine = build([], module, param_dtype="float64", gradient_checkpointing=number > 0, **placement)
        train(engine)
        engine.save(tmp_path / str(number))
        engine.release()
        adapters.append(load_file(tmp_path / str(number) / "adapter" / "adapter_model.safetensors"))
    for other in adapters[1:]:
        assert other.keys() == adapters[0].keys()
        for name, tensor in other.items():
            torch.testing.assert_close(tensor, adapters[0][name], atol=1e-9, rtol=0, msg=name)


@pytest.mark.parametrize(("size", "tp_size"), [(1, 1), (2, 1), (2, 2)])
def test_a_resumed_engine_goes_on_with_the_same_adapters(
    engines: list[Any], models: dict[str, Path], tmp_path: Path, size: int, tp_size: int
) -> None:
    engine = build(engines, policy_module(models["qwen2"], optimizer(), LORA), size=size, tp_size=tp_size)
    train(engine, steps=2)
    engine.save_state(tmp_path / "state")
    expected = train(engine, steps=2)
    resumed = build(engines, policy_module(models["qwen2"], optimizer(), LORA), size=size, tp_size=tp_size)
    resumed.load_state(tmp_path / "state")
    assert train(resumed, steps=2) == expected
    for name, tensor in engine.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_a_reward_models_adapters_and_head_open_in_peft(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    engine = build(engines, critic_module(models["qwen2"], optimizer(), LORA), size=2, tp_size=2)
    losses = train(engine, score_loss)
    assert losses[-1] < losses[0] - 0.1
    engine.save(tmp_path)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    base = AutoModelForSequenceClassification.from_pretrained(models["qwen2"], num_labels=1)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(IDS).logits, merged(IDS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_every_trainer_of_rows_trains_adapters(
    engines: list[Any], models: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    config, trainer = TRAINERS[kind]
    key = "critic" if kind == "rm" else "actor"
    own = {"model_name": models["qwen2"], "lr": "2e-2", "lora.rank": 4, "lora.target_modules": "[q_proj, up_proj]"}
    argv = [f"{key}.{name}={value}" for name, value in own.items()]
    argv += ["data.path=-", "data.batch_size=8", f"trainer.save_dir={tmp_path}", "trainer.n_epochs=3"]
    if kind == "sft":
        rows = sft_rows([{"prompt": f"{n}>", "response": "yes!"} for n in range(16)], byte_tokenizer(), 32)
    else:
        pairs = [{"prompt": f"{n}>", "chosen": "yes!", "rejected": "no"} for n in range(16)]
        rows = preference_rows(pairs, byte_tokenizer(), 32)
    made = trainer(load(config, argv), rows)
    engines.append(made.engine)
    if kind == "dpo":
        assert made.reference.engine is made.engine, "no second model"
    made.fit()
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    adapter = load_file(tmp_path / "latest" / "adapter" / "adapter_model.safetensors")
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in adapter if ".lora_" in name} == {"q_proj", "up_proj"}
    assert [name for name in adapter if ".lora_" not in name] == ["base_model.model.score.weight"] * (kind == "rm")


@pytest.mark.parametrize(("size", "tp_size"), [(1, 1), (2, 1), (2, 2)])
def test_without_its_adapters_a_policy_is_the_model_that_it_began_as(
    engines: list[Any], models: dict[str, Path], size: int, tp_size: int
) -> None:
    batch = make_batch([9, 4, 7, 6, 3])
    engine = build(engines, policy_module(models["qwen2"], optimizer(), LORA), size=size, tp_size=tp_size)
    plain = build(engines, policy_module(models["qwen2"]), size=size, tp_size=tp_size)
    train(engine)
    trained = engine.forward(batch, OwnLogprobs())
    base = engine.forward(batch, OwnLogprobs(), without_adapters=True)
    assert torch.equal(base, plain.forward(batch, OwnLogprobs()))
    assert not torch.allclose(base, trained)
    assert torch.equal(engine.forward(batch, OwnLogprobs()), trained), "they are back"
    losses = train(engine)
    assert losses[-1] < losses[0]
    with pytest.raises(ConfigError, match="no adapters to switch off"):
        plain.forward(batch, OwnLogprobs(), without_adapters=True)


@pytest.mark.nightly
def test_a_kl_penalty_on_adapters_needs_no_second_model(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    sampling = SamplingOptions(max_new_tokens=8)
    options = PpoConfig(
        actor=ActorOptions(model_name=str(models["qwen3"]), lr=1e-2, lora=LORA),
        kl=KlOptions(type="loss"),
        train_data=PromptOptions(prompts_per_rollout=8, responses_per_prompt=4),
        rollout=RolloutOptions(train_sampling_params=sampling, max_model_len=64, max_num_seqs=32),
        trainer=TrainerOptions(save_dir=str(tmp_path), total_steps=2),
    )
    rows = [{"messages": [{"role": "user", "content": f"{number}?"}]} for number in range(8)]
    made = PpoTrainer(options, SingleTurnWorkflow(digits, sampling.gconfig(), byte_tokenizer()), rows, ())
    assert made.engines.reference is None
    engines += [made.engines.rollout, made.engines.actor]
    made.fit()
    first, second = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert first["kl"] == 0.0, "adapters begin as nothing"
    assert second["kl"] > 1e-4
    assert {"seconds_reference"} <= set(second)


def test_an_actor_and_its_critic_learn_by_adapters(engines: list[Any], models: dict[str, Path], tmp_path: Path) -> None:
    sampling = SamplingOptions(max_new_tokens=8)
    options = PpoConfig(
        actor=ActorOptions(model_name=str(models["qwen3"]), lr=1e-2, lora=LORA),
        adv=AdvantageOptions(estimator="gae"),
        train_data=PromptOptions(prompts_per_rollout=8, responses_per_prompt=4),
        rollout=RolloutOptions(train_sampling_params=sampling, max_model_len=64, max_num_seqs=32),
        trainer=TrainerOptions(save_dir=str(tmp_path), total_steps=2),
    )
    rows = [{"messages": [{"role": "user", "content": f"{number}?"}]} for number in range(8)]
    made = PpoTrainer(options, SingleTurnWorkflow(digits, sampling.gconfig(), byte_tokenizer()), rows, ())
    assert made.engines.critic is not None
    engines += [made.engines.rollout, made.engines.actor, made.engines.critic]
    made.fit()
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(line["logprob_drift"] < 1e-4 for line in metrics), "what answers is what is trained"
    adapter = load_file(tmp_path / "latest" / "adapter" / "adapter_model.safetensors")
    assert all(tensor.any() for tensor in adapter.values())
