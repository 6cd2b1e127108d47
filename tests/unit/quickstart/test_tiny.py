from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from rlite.assembly.quickstart.run import build_tiny_qwen3, byte_tokenizer
from rlite.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("tiny"), seed=1, hidden_size=64)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text())
def test_every_text_survives_the_saved_tokenizer_with_one_token_per_byte(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert ids == byte_tokenizer()(text)["input_ids"]


def test_the_template_is_chatml_and_its_marks_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "Hé!"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHé!<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert len(ids) == len("user\nHé!\nassistant\n".encode()) + 3
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_the_checkpoint_opens_as_a_causal_model_and_ends_at_the_turns_end(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.rope_parameters["rope_theta"] == 100.0
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, len(tokenizer))


def test_the_seed_decides_the_weights_and_the_process_keeps_its_random_state(folder: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    again = build_tiny_qwen3(tmp_path / "again", seed=1, hidden_size=64)
    other = build_tiny_qwen3(tmp_path / "other", seed=2, hidden_size=64)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_sizes_without_a_whole_number_of_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hidden_size must be head_dim x num_heads"):
        build_tiny_qwen3(tmp_path, seed=0, hidden_size=100)
    with pytest.raises(ConfigError, match=r"found hidden_size=192, .*num_key_value_heads=4"):
        build_tiny_qwen3(tmp_path, seed=0, hidden_size=192, num_key_value_heads=4)


def test_a_tiny_model_and_the_check_of_environments_need_no_package_for_plots() -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import rlite.assembly.commands.env_check\n"
        "from rlite.assembly.quickstart.run import build_tiny_qwen3, main\n"
        "from rlite.errors import ConfigError\n"
        "try: main(['folder=/nowhere/run'])\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "plots need the package matplotlib" in done.stdout, "before the first step"
