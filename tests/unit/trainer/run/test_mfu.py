"""FLOPs of training, counted by hand and by torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlite.nn import LoraOptions
from rlite.services.console.mfu import ModelSize, mfu, peak_flops, training_flops
from rlite.trainer.model.modules import critic_module, policy_module
from tests.tiny import build_model_dir

QWEN3_0_6B = {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
H100 = "NVIDIA H100 80GB HBM3"


def test_flops_of_a_known_model_are_those_counted_by_hand() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **QWEN3_0_6B))
    layer = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    num_parameters = 28 * layer + 1024 + 151936 * 1024
    size = ModelSize.of(model)
    assert size == ModelSize(num_multiplied=num_parameters, num_trained=num_parameters, attention_width=28 * 16 * 128)
    assert training_flops(size, [8192]) == 8192 * (6 * num_parameters + 6 * 28 * 2048 * 8193)
    # others count 26.0k tokens/s in sequences of 8,192, and 11.9k in such of 16,384, as 16.8 % and 11.1 % of an H100
    assert mfu(size, [8192], 8192 / 26.0e3, [H100]) == pytest.approx(0.168, abs=5e-4)
    assert mfu(size, [16384], 16384 / 11.9e3, [H100]) == pytest.approx(0.111, abs=5e-4)
    assert mfu(size, [8192] * 2, 8192 / 26.0e3, [H100] * 2) == pytest.approx(0.168, abs=5e-4)
    assert mfu(size, [8192], 1.0, [H100, "cpu"]) is None


@pytest.mark.parametrize("tie", [True, False])
def test_flops_are_those_that_torch_counts(tmp_path: Path, tie: bool) -> None:
    """But for norms, which torch does not count, attention, whose masked half it does, and the rotary angles.

    Older releases of transformers compute the angles by a matrix product.
    """
    path = build_model_dir(tmp_path / "model", "llama", tie=tie)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    size, length = ModelSize.of(model), 48
    assert size is not None
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 256, (1, length))).logits.sum().backward()
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    masked = 12 * size.attention_width * (length * (length - 1) // 2)
    angles = sum(counter.get_flop_counts().get("LlamaForCausalLM.model.rotary_emb", {}).values())
    assert training_flops(size, [length]) - 6 * norms * length + masked + angles == counter.get_total_flops()


def test_sequences_of_a_batch_do_not_meet() -> None:
    size = ModelSize(num_multiplied=10, num_trained=10, attention_width=4)
    assert training_flops(size, [3, 2]) == 6 * 10 * 5 + 12 * 4 * (6 + 3)
    assert training_flops(size, []) == 0


def test_flops_exclude_frozen_and_unmultiplied_parameters(tmp_path: Path) -> None:
    path = build_model_dir(tmp_path / "model", tie=False)
    policy, critic = ModelSize.of(policy_module(path)), ModelSize.of(critic_module(path))
    adapters = ModelSize.of(policy_module(path, lora=LoraOptions(rank=2)))
    assert policy is not None
    assert critic is not None
    assert adapters is not None
    assert policy.num_multiplied - critic.num_multiplied == 259 * 128 - 128, "an output matrix, or a head of one row"
    assert policy.num_multiplied + adapters.num_trained == adapters.num_multiplied


def test_a_mixture_of_experts_is_not_guessed() -> None:
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=1, hidden_size=64, num_experts=4, vocab_size=32)
    with torch.device("meta"):
        assert ModelSize.of(AutoModelForCausalLM.from_config(config)) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        (H100, 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name_or_not_at_all(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
