"""The memory of generation in a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import rlite
from rlite.assembly.commands.options import PlanConfig, RolloutPlanOptions
from rlite.assembly.commands.plan import RolloutMemory, rollout_memory
from rlite.config import load
from rlite.errors import ConfigError
from rlite.nn.pretrained import load_config, meta_model
from tests.hybrids import hybrid, save_hybrid
from tests.mixtures import build_mixture_dir, config_of
from tests.tiny import build_model_dir

CONFIG = Qwen2Config(
    hidden_size=1024,
    intermediate_size=40960,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=32768,
)
with torch.device("meta"):
    MODEL = Qwen2ForCausalLM(CONFIG)
NUM_PARAMETERS = sum(parameter.numel() for parameter in MODEL.parameters())
PER_TOKEN = 2 * 4 * 4 * 128 * 2
"""bytes of keys and values in bfloat16, of all heads"""


def memory(device_memory_gib: float | None = None, **options: object) -> RolloutMemory:
    return rollout_memory(RolloutPlanOptions(**options), MODEL, device_memory_gib)


def test_the_cache_has_the_pages_of_the_longest_sequences_and_one_for_empty_rows() -> None:
    found = memory(max_num_seqs=8, max_model_len=1000)
    assert (found.weights, found.num_seqs) == (2 * NUM_PARAMETERS, 8)
    assert found.kv_cache == (8 * 16 + 1) * 64 * PER_TOKEN


def test_a_replica_divides_weights_and_heads() -> None:
    whole, half = memory(max_num_seqs=8), memory(max_num_seqs=8, tp_size=2)
    assert (2 * half.weights, 2 * half.kv_cache) == (whole.weights, whole.kv_cache)


def test_executor_torch_takes_no_more_slots_than_it_needs_and_vllm_all_that_it_may() -> None:
    few = {"max_num_seqs": 2, "max_model_len": 1024}
    torch, vllm = memory(10, **few), memory(10, executor="vllm", **few)
    assert torch.num_seqs == 2
    assert vllm.total == int(10 * 0.6 * 2**30)
    assert vllm.num_seqs > torch.num_seqs


def test_the_default_length_is_that_of_the_executor() -> None:
    assert memory().max_model_len == 4096
    assert memory(executor="vllm").max_model_len == 32768


def write(kind: str, folder: Path) -> Path:
    if kind == "qwen2":
        return build_model_dir(folder, hidden=64)
    return build_mixture_dir(folder, kind) if kind == "qwen3_moe" else save_hybrid(hybrid(kind), folder)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "qwen3_5_text", "falcon_h1", "lfm2"])
def test_an_engine_holds_what_the_plan_says(kind: str, tmp_path: Path) -> None:
    model = write(kind, tmp_path / "model")
    sizes = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128}
    planned = rollout_memory(RolloutPlanOptions(**sizes), meta_model(load_config(model)), None)
    rlite.init("cpu", 1)
    try:
        engine = rlite.RliteInferenceEngine(model)
        engine.build(**sizes)
        assert engine.memory_bytes() == [{"weights": planned.weights, "kv_cache": planned.kv_cache}]
    finally:
        rlite.shutdown()


def mixture(kind: str) -> Any:
    return meta_model(config_of(kind))


def numel(model: Any, part: str) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if part in name)


@pytest.mark.parametrize(("kind", "whole"), [("qwen3_moe", ["experts"]), ("deepseek_v3", ["routed", "self_attn"])])
def test_executor_torch_leaves_experts_and_undivided_attention_whole_on_each_device(
    kind: str, whole: list[str]
) -> None:
    model = mixture(kind)
    total, kept = numel(model, ""), sum(numel(model, part.replace("routed", ".experts.")) for part in whole)
    found = rollout_memory(RolloutPlanOptions(tp_size=2), model, None)
    assert found.weights == 2 * (kept + (total - kept) // 2)
    alone = rollout_memory(RolloutPlanOptions(), model, None)
    assert found.kv_cache == (alone.kv_cache if kind == "deepseek_v3" else alone.kv_cache // 2)
    other = rollout_memory(RolloutPlanOptions(tp_size=2, executor="vllm"), model, None)
    assert other.weights == 2 * (total // 2)


def test_a_hybrid_that_several_devices_would_share_is_refused() -> None:
    model = meta_model(hybrid("qwen3_5_text").config)
    with pytest.raises(ConfigError, match=r"rollout\.tp_size=2: .* carries a state .* use rollout\.tp_size=1"):
        rollout_memory(RolloutPlanOptions(tp_size=2), model, None)


@pytest.mark.parametrize(
    ("device_memory_gib", "options", "message"),
    [
        (None, {"executor": "vlm"}, "rollout.executor=vlm: did you mean 'vllm'"),
        (None, {"tp_size": 3}, "does not divide num_key_value_heads=4"),
        (None, {"max_model_len": 10**6}, "beyond the model's max_position_embeddings=32768"),
        (2, {}, "one sequence of max_model_len=4096 needs 0.03 GiB of KV cache, and the weights leave 0.00 GiB"),
    ],
)
def test_replicas_that_do_not_fit_are_refused(
    device_memory_gib: float | None, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        memory(device_memory_gib, **options)


def test_replicas_divide_the_devices() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tp_size=3 does not divide num_devices=8"):
        load(PlanConfig, ["model_name=m", "num_devices=8", "rollout.tp_size=3"])
