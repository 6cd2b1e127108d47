"""deterministic=true: the engines' log-probabilities are equal bit for bit, with shards, packs and weight syncs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.algorithms import TokenLogprobs, next_token, on_logprobs
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError
from rlite.nn import LoraOptions
from rlite.rollout import MultiTurnWorkflow
from rlite.trainer.model.modules import critic_module, policy_module
from rlite.trainer.rl.objective import OwnLogprobs
from rlite.types import GenerationHyperparameters
from tests.integration.modules import POLICIES, make_batch, num_counted, on_meta
from tests.integration.rewards import digits
from tests.integration.worlds import world
from tests.marks import nightly
from tests.mixtures import build_mixture_dir
from tests.tiny import build_model_dir

LENGTHS = (3, 90, 41, 64, 1, 130, 17, 5, 66)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen2": build_model_dir(root / "qwen2", "qwen2", hidden=64, vocab_size=264),
        "qwen3": build_model_dir(root / "qwen3", "qwen3", hidden=96),
        "llama": build_model_dir(root / "llama", "llama", tie=False, hidden=64, vocab_size=264, attention_bias=True),
        "qwen3_moe": build_mixture_dir(root / "qwen3_moe", "qwen3_moe"),
    }


def served_batch(engine: RliteInferenceEngine, temperature: float, seed: int) -> dict[str, Tensor]:
    """Completions of random prompts, with the served log-probabilities at their tokens and 0 at the prompts."""
    prompts = make_batch(LENGTHS, seed)
    ids = [row[:length].tolist() for row, length in zip(prompts["input_ids"], LENGTHS, strict=True)]
    outputs = engine.generate(ids, {"max_new_tokens": 40, "temperature": temperature, "ignore_eos": True, "seed": seed})
    batch = make_batch([length + 40 for length in LENGTHS])
    batch["logprobs"] = torch.zeros(batch["input_ids"].shape)
    for row, (prompt, output) in enumerate(zip(ids, outputs, strict=True)):
        answer = output.outputs[0]
        batch["input_ids"][row, : len(prompt) + 40] = torch.tensor([*prompt, *answer.token_ids])
        batch["logprobs"][row, len(prompt) : len(prompt) + 40] = torch.tensor(answer.logprobs)
    batch["loss_mask"] = (batch["logprobs"].roll(-1, dims=1) != 0).long()
    return batch


def equal_share(tokens: TokenLogprobs, data: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss, and the share of log-probabilities with the served bits."""
    counted = data["loss_mask"].bool()
    is_equal = tokens.logprobs == next_token(data["logprobs"], data["cu_seqlens"])
    return -tokens.logprobs[counted].mean(), {"equal": is_equal[counted].double().mean()}


def check_equality(serve: RliteInferenceEngine, train: RliteTrainEngine, temperature: float, seed: int) -> None:
    batch = served_batch(serve, temperature, seed)
    is_generated = batch["logprobs"] != 0
    assert is_generated.sum() == 40 * len(LENGTHS)
    for limit in (None, 2048):
        found = train.forward(batch, OwnLogprobs(temperature=temperature), limit)
        assert torch.equal(found[is_generated], batch["logprobs"][is_generated])
    loss = on_logprobs(equal_share, temperature=temperature)
    assert train.train_batch(batch, loss, num_counted)["equal"] == 1.0


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["qwen3_moe", *nightly("qwen2", "qwen3", "llama")])
def test_both_engines_have_the_same_logprobs_before_and_after_a_step(
    models: dict[str, Path], kind: str, size: int
) -> None:
    serve = RliteInferenceEngine(models[kind])
    serve.build(data_parallel_size=2, max_model_len=192, max_num_seqs=7, dtype="float32", deterministic=True)
    train = RliteTrainEngine(on_meta(POLICIES[kind], models[kind]))
    train.build(
        tensor_parallel_size=size,
        data_parallel_size=1,
        max_tokens_per_microbatch=256,
        deterministic=True,
        gradient_checkpointing=kind == "llama",
        colocate_with=serve,
    )
    train.train()
    for seed, temperature in enumerate((1.0, 0.7)):
        check_equality(serve, train, temperature, seed)
        train.p2p_weight_sync(serve)
    prompts = [list(range(number, 2 * number)) for number in range(3, 10)]
    assert serve.score(prompts) == [scored for prompt in prompts for scored in serve.score([prompt])]
    train.release()
    serve.release()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3_moe"])
def test_tensor_parallel_engines_of_two_ranks_have_the_same_logprobs(models: dict[str, Path], kind: str) -> None:
    serve = RliteInferenceEngine(models[kind])
    serve.build(tensor_parallel_size=2, max_model_len=192, max_num_seqs=7, dtype="float32", deterministic=True)
    train = RliteTrainEngine(on_meta(POLICIES[kind], models[kind]))
    train.build(tensor_parallel_size=2, data_parallel_size=1, tp_size=2, deterministic=True, colocate_with=serve)
    for seed, temperature in enumerate((1.0, 0.7)):
        check_equality(serve, train, temperature, seed)
        train.p2p_weight_sync(serve)
    train.release()
    serve.release()


def test_unsupported_deterministic_models_are_refused_before_any_process_starts(
    models: dict[str, Path], tmp_path: Path
) -> None:
    model, split = models["qwen2"], {"tp_size": 2, "tensor_parallel_size": 2}
    gelu = build_model_dir(tmp_path / "gelu", "llama", hidden=64, hidden_act="gelu")
    dropout = build_model_dir(tmp_path / "dropout", "qwen2", hidden=64, attention_dropout=0.1)
    cases = [
        (policy_module(gelu), {}, r"the model \(llama\) is not a Llama, Qwen2, Qwen3 or Qwen3-MoE with silu"),
        (critic_module(model), {}, "is not a Llama, Qwen2, Qwen3 or Qwen3-MoE"),
        (policy_module(model, lora=LoraOptions(dropout=0.1)), {}, r"lora\.dropout=0\.1, which gives other bits"),
        (policy_module(model, lora=LoraOptions()), split, "with tp_size=2 training"),
        (policy_module(dropout, disable_dropout=False), {}, r"attention dropout \(0.1\)"),
        (policy_module(model), {"param_dtype": "float64"}, "computes in float32, not in float64"),
        (policy_module(model), {"compute_dtype": "bfloat16"}, "computes in float32, not in bfloat16"),
        (policy_module(model), {"sp_size": 2, "tensor_parallel_size": 2}, "sp_size=2"),
    ]
    for module, options, message in cases:
        engine = RliteTrainEngine(module)
        with pytest.raises(ConfigError, match=message):
            engine.build(**{"tensor_parallel_size": 1, "data_parallel_size": 1, "deterministic": True, **options})
        assert not engine.is_built


@pytest.mark.parametrize("kind", ["qwen3", *nightly("qwen2", "llama")])
def test_truncated_rollouts_have_the_same_logprobs_over_their_kept_ids(models: dict[str, Path], kind: str) -> None:
    serve = RliteInferenceEngine(models[kind])
    serve.build(max_model_len=256, max_num_seqs=7, dtype="float32", deterministic=True)
    train = RliteTrainEngine(on_meta(POLICIES[kind], models[kind]))
    train.build(data_parallel_size=2, max_tokens_per_microbatch=300, deterministic=True, colocate_with=serve)
    rows = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(3) for b in range(3)]
    for sampling in ({"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.8, "top_k": 30, "temperature": 0.7}):
        gconfig = GenerationHyperparameters(max_new_tokens=16, **sampling)
        workflow = MultiTurnWorkflow(digits, gconfig, byte_tokenizer(), max_turns=2, solved=2.0)
        batch = serve.rollout_batch(rows, workflow, group_size=2)
        is_generated = batch["loss_mask"].bool()
        assert (batch["kept_counts"][is_generated] > 0).all()
        found = train.forward(batch, OwnLogprobs(temperature=gconfig.temperature))
        assert torch.equal(found[is_generated], batch["logprobs"][is_generated])
    train.release()
    serve.release()
