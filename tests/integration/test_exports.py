"""Exports are read by the programs for which they are written: transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.models.lora import merge_adapter
from rlite.config import load
from rlite.data.sft import labelled_rows, preference_rows, sft_rows
from rlite.errors import ConfigError
from rlite.nn.pretrained import quiet_transformers
from rlite.trainer.dpo import DpoTrainer
from rlite.trainer.kto import KtoTrainer
from rlite.trainer.rm import RmTrainer
from rlite.trainer.sft import SftTrainer
from rlite.trainer.supervised_options import DpoConfig, KtoConfig, RmConfig, SftConfig
from tests.tiny import build_model_dir

IDS = torch.tensor([[11, 12, 13, 200, 7, 91, 4, 77, 8]])
PAIRS = [{"prompt": f"{n}>", "chosen": "yes" * n, "rejected": "no"} for n in range(1, 5)]
ANSWERS = [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS]
LABELS = [{"prompt": row["prompt"], "completion": "yes", "label": n % 2 == 0} for n, row in enumerate(PAIRS)]
TRAINERS: dict[str, tuple[Any, Any, Any, list[Any], str]] = {
    "sft": (SftConfig, SftTrainer, sft_rows, ANSWERS, "actor"),
    "dpo": (DpoConfig, DpoTrainer, preference_rows, PAIRS, "actor"),
    "rm": (RmConfig, RmTrainer, preference_rows, PAIRS, "critic"),
    "kto": (KtoConfig, KtoTrainer, labelled_rows, LABELS, "actor"),
}


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def trainer(kind: str, model: Path, out: Path, *settings: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Any:
    config, cls, tokenise, rows, key = TRAINERS[kind]
    given = [f"{key}.model_name={model}", "data.path=-", "data.batch_size=4", f"trainer.save_dir={out}"]
    made = tokenise(rows, tokenizer or byte_tokenizer(), 64)
    return cls(load(config, [*given, f"{key}.lr=1e-2", *settings]), made)


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


# -- what a checkpoint consists of -------------------------------------------------------------------------------------


def test_an_export_has_every_file_that_a_user_of_the_original_needs(tmp_path: Path) -> None:
    model = build_model_dir(tmp_path / "model", hidden=32)
    files = {
        "additional_chat_templates/tool_use.jinja": "{{ messages[0].content }}",
        "chat_template.jinja": "{{ messages[-1].content }}",
        "preprocessor_config.json": "{}",
        "processor_config.json": "{}",
        "video_preprocessor_config.json": "{}",
        "generation_config.json": '{"eos_token_id": [258, 256], "temperature": 0.6, "do_sample": true}',
        "added_tokens.json": "{}",
        "spiece.model": "of sentencepiece",
        "qwen.tiktoken": "of tiktoken",
        "vocab.txt": "words",
        "merges.txt": "pairs",
    }
    for name, content in files.items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(content)
    (model / "code.py").write_text("raise SystemExit")
    out = tmp_path / "run"
    trainer("sft", model, out).fit()
    assert {name: (out / "latest" / name).read_text() for name in files if name != "generation_config.json"} == {
        name: content for name, content in files.items() if name != "generation_config.json"
    }
    assert json.loads((out / "latest/generation_config.json").read_text())["temperature"] == 0.6
    assert not (out / "latest/code.py").exists()
    assert set(AutoTokenizer.from_pretrained(out / "latest").chat_template) == {"default", "tool_use"}


# -- scores ------------------------------------------------------------------------------------------------------------


def padded_by(pad: str, end: str, folder: Path) -> tuple[Path, PreTrainedTokenizerBase]:
    """A model whose tokenizer pads with one token and ends texts with another one."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token, tokenizer.eos_token = pad, end
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = build_model_dir(folder, hidden=32, **ids)
    tokenizer.save_pretrained(model)
    return model, tokenizer


@pytest.mark.parametrize(
    ("pad", "end"),
    [("<|im_end|>", "<|im_end|>"), ("<|endoftext|>", "<|endoftext|>"), ("<|endoftext|>", "<|im_end|>")],
)
def test_transformers_scores_padded_pairs_as_the_trainer_does(pad: str, end: str, tmp_path: Path) -> None:
    model, tokenizer = padded_by(pad, end, tmp_path / "model")
    learner = trainer("rm", model, tmp_path / "run", "trainer.n_epochs=2", tokenizer=tokenizer)
    learner.fit()
    batch = learner.rows.batch(range(4))
    lengths = batch["attention_mask"].sum(-1)
    ours = learner.engine.forward(batch, lambda scores, _: scores)[torch.arange(8), lengths - 1]
    read = AutoTokenizer.from_pretrained(tmp_path / "run/latest")
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/latest").eval()
    texts = [row[:length].tolist() for row, length in zip(batch["input_ids"], lengths, strict=True)]
    assert any(row[-1] == tokenizer.eos_token_id for row in texts)
    with torch.no_grad():
        theirs = exported(**read.pad({"input_ids": texts}, return_tensors="pt")).logits[:, 0]
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
    assert exported.config.pad_token_id == read.pad_token_id not in {row[-1] for row in texts}
    if pad != end:
        assert read.pad_token == pad


def test_rows_that_end_with_every_special_token_are_refused(tmp_path: Path) -> None:
    model = build_model_dir(tmp_path / "model", hidden=32)
    rows = preference_rows(PAIRS, byte_tokenizer(), 64)
    rows.input_ids[rows.starts[1:] - 1] = [256, 257, 258] * 2 + [256, 257]
    given = [f"critic.model_name={model}", "data.path=-", "data.batch_size=4", f"trainer.save_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match="Add a pad token to the tokenizer"):
        RmTrainer(load(RmConfig, given), rows)


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_adapters_of_a_model_with_transposed_layers_are_trained_saved_and_read(tmp_path: Path) -> None:
    tokenizer, path = byte_tokenizer(), tmp_path / "gpt2"
    config = AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=64)
    torch.manual_seed(0)
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    learner = trainer("sft", path, tmp_path / "run", "actor.lora.rank=4", "trainer.n_epochs=4")
    learner.fit()
    latest = tmp_path / "run/latest"
    merged = AutoModelForCausalLM.from_pretrained(latest)
    base = AutoModelForCausalLM.from_pretrained(path)
    before = logits(base)
    adapted = peft.PeftModel.from_pretrained(base, latest / "adapter")
    torch.testing.assert_close(logits(adapted), logits(merged), atol=1e-4, rtol=0)
    assert (logits(merged) - before).abs().max() > 0.01
    (tmp_path / "out").mkdir()
    merge_adapter(latest / "adapter", str(path), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(merged), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
    ("targets", "whole"),
    [
        (["lm_head"], None),
        (["embed_tokens"], None),
        (["lm_head", "embed_tokens", "q_proj"], None),
        (["q_proj"], ["lm_head"]),
        (["q_proj"], ["embed_tokens"]),
    ],
)
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_an_adapter_at_a_head_or_embedding_is_merged_right(
    tie: bool, targets: list[str], whole: list[str] | None, tmp_path: Path
) -> None:
    model = build_model_dir(tmp_path / "model", hidden=32, tie=tie)
    options = peft.LoraConfig(target_modules=targets, modules_to_save=whole, r=4, task_type="CAUSAL_LM")
    torch.manual_seed(3)
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), options)
    for name, parameter in made.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    made.save_pretrained(tmp_path / "adapter")
    expected = logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter"))
    (tmp_path / "out").mkdir()
    merge_adapter(tmp_path / "adapter", str(model), tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(expected, logits(AutoModelForCausalLM.from_pretrained(model)), atol=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": r"(([a-z0-9_.])+)+X|.*q_proj"},
        {"exclude_modules": r"([a-z_.0-9]*)*X"},
        {"rank_pattern": {r"(.*)*(.*)*(.*)*X": 8}},
    ],
    ids=str,
)
def test_a_pattern_that_does_not_end_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    model = build_model_dir(tmp_path / "model", hidden=32)
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(target_modules=["q_proj"]))
    made.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ConfigError, match="take more than 5 s to match"):
        merge_adapter(tmp_path / "adapter", str(model), tmp_path / "out")


# -- rows that the model cannot take -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 200}, r"row index \d of data holds token id 2\d\d, and the model's vocabulary has 200 tokens"),
        ({"max_position_embeddings": 4}, r"row index \d of data has \d+ tokens, and the model has positions for 4 "),
    ],
    ids=["vocabulary", "positions"],
)
def test_rows_beyond_the_model_are_refused_before_it_is_loaded(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    ids = {"eos_token_id": 0, "pad_token_id": 1} if "vocab_size" in change else {}
    model = build_model_dir(tmp_path / "model", hidden=32, **change, **ids)
    with pytest.raises(ConfigError, match=message):
        trainer(kind, model, tmp_path / "run")
