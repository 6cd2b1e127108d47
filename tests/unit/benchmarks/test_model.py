"""The benchmark's checkpoint: what both sides of a comparison rely on."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.model import build_model, build_prompts


def test_a_stopping_model_ends_with_the_same_probability_after_any_text(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_model(tmp_path / "m", stop_probability=0.0235)).eval()
    tokens = torch.randint(0, 256, (4, 100), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        probability = model(tokens).logits.softmax(-1)[..., model.config.eos_token_id]
    assert math.isclose(float(probability.mean()), 0.0235, rel_tol=0.1)
    assert float(probability.std()) < 0.005


def test_prompts_are_the_same_as_token_ids_and_as_text(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(build_model(tmp_path / "m"))
    prompts = build_prompts()
    assert {8, 64} <= {len(prompt) for prompt in prompts}
    assert all(tokenizer(tokenizer.decode(prompt)).input_ids == prompt for prompt in prompts)
