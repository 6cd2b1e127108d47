"""Models whose checkpoints are stored in another form are trained, synced, served and exported in that form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.models.lora import merge_adapter
from rlite.config import load
from rlite.data.sft import preference_rows, sft_rows
from rlite.errors import CheckpointError
from rlite.runtime.storage import huggingface
from rlite.trainer.model.modules import policy_module
from rlite.trainer.rm import RmTrainer
from rlite.trainer.sft import SftTrainer
from rlite.trainer.supervised_options import RmConfig, SftConfig
from tests.unit.backends.models.small import container, tensors_in, text_model, written

ROWS = [{"prompt": f"{n}>", "response": "yes" * n} for n in range(1, 5)]
PAIRS = [{"prompt": f"{n}>", "chosen": "yes" * n, "rejected": "no"} for n in range(1, 5)]


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def stored(kind: str, folder: Path) -> Path:
    """A checkpoint with a tokenizer."""
    written(container(kind) if kind in ("gemma3", "mistral3") else text_model(kind), folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def sft(model: Path, out: Path, *settings: str) -> Path:
    """Train a model for one step, and return its export."""
    given = [f"actor.model_name={model}", "data.path=-", "data.batch_size=4", f"trainer.save_dir={out}"]
    config = load(SftConfig, [*given, "actor.lr=1e-2", "trainer.n_epochs=1", *settings])
    SftTrainer(config, sft_rows(ROWS, byte_tokenizer(), 64)).fit()
    return out / "latest"


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_the_text_model_is_trained_and_the_rest_of_the_container_is_exported_unchanged(
    kind: str, tmp_path: Path
) -> None:
    model = stored(kind, tmp_path / "model")
    out = sft(model, tmp_path / "run")
    changed = difference(tensors_in(model), tensors_in(out))
    assert changed
    assert all("language_model" in name or "lm_head" in name for name in changed)
    assert AutoConfig.from_pretrained(out).architectures == AutoConfig.from_pretrained(model).architectures
    found = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)[1]
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


def test_gpt_neox_is_trained_and_exported_under_its_stored_names(tmp_path: Path) -> None:
    model = stored("gpt_neox", tmp_path / "model")
    out = sft(model, tmp_path / "run")
    assert difference(tensors_in(model), tensors_in(out))
    assert "embed_out.weight" in tensors_in(out)


def test_a_served_container_answers_as_its_text_model(tmp_path: Path) -> None:
    model = stored("gemma3", tmp_path / "model")
    plain = AutoModelForImageTextToText.from_pretrained(model).eval()
    ids = list(range(40, 60))
    engine = RliteInferenceEngine(model)
    engine.build()
    (found,) = engine.prompt_logprobs([ids])
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(found[-19:]), expected[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0], atol=1e-4, rtol=0
    )
    engine.release()


def test_a_text_model_leaves_its_container_if_the_rest_is_dropped(tmp_path: Path) -> None:
    model = stored("gemma3", tmp_path / "model")
    out = sft(model, tmp_path / "run", "actor.drop_untrained=true")
    opened, found = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(opened).__name__ == "Gemma3ForCausalLM"
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


def test_an_adapter_of_a_text_model_is_merged_into_its_container(tmp_path: Path) -> None:
    model = stored("gemma3", tmp_path / "model")
    out = sft(model, tmp_path / "run", "actor.lora.rank=4")
    (tmp_path / "merged").mkdir()
    merge_adapter(out / "adapter", str(model), tmp_path / "merged")
    merged, exported = tensors_in(tmp_path / "merged"), tensors_in(out)
    assert merged.keys() == exported.keys() == tensors_in(model).keys()
    assert all(torch.allclose(merged[name], exported[name], atol=1e-6) for name in merged)
    assert difference(merged, tensors_in(model))


def test_a_scorer_is_made_of_the_text_model_alone(tmp_path: Path) -> None:
    model, out = stored("gemma3", tmp_path / "model"), tmp_path / "run"
    given = [f"critic.model_name={model}", "data.path=-", "data.batch_size=4", f"trainer.save_dir={out}"]
    RmTrainer(load(RmConfig, [*given, "trainer.n_epochs=1"]), preference_rows(PAIRS, byte_tokenizer(), 64)).fit()
    found = AutoModelForSequenceClassification.from_pretrained(out / "latest", output_loading_info=True)[1]
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


def in_fp8(folder: Path) -> dict[str, Tensor]:
    """Store the projections of a checkpoint in fp8, and return what they stand for."""
    meant, files = {}, tensors_in(folder)
    for name, tensor in list(files.items()):
        if name.endswith("proj.weight"):
            scale = tensor.abs().amax() / 200
            grid = torch.full((-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 16)), float(scale))
            files[name], files[f"{name}_scale_inv"] = (tensor / scale).to(torch.float8_e4m3fn), grid
            meant[name] = (files[name].float() * scale).bfloat16()
        else:
            files[name] = meant[name] = tensor.bfloat16()
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def test_a_checkpoint_in_fp8_is_trained_served_and_exported_in_bfloat16(tmp_path: Path) -> None:
    model = stored("qwen3", tmp_path / "model")
    meant = in_fp8(model)
    out = sft(model, tmp_path / "run", "actor.lr=0")
    assert not difference(tensors_in(out), meant)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    answers = []
    for folder in (model, out):
        engine = RliteInferenceEngine(folder)
        engine.build(dtype="float32")
        answers.append(engine.prompt_logprobs([list(range(40, 60))]))
        engine.release()
    assert answers[0] == answers[1]


def test_an_export_without_the_source_names_the_remedy(tmp_path: Path) -> None:
    model = stored("gemma3", tmp_path / "model")
    engine = RliteTrainEngine(policy_module(model))
    engine.build()
    tensors = tensors_in(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds 50 tensors .*cannot be read again.*drop_untrained=true"):
        engine.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    engine.save(tmp_path / "out")
    assert not difference(tensors_in(tmp_path / "out"), tensors)
    engine.release()


def test_an_export_writes_each_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "MAX_FILE_BYTES", 1)
    model = stored("deepseek_v3", tmp_path / "model")  # its routers have buffers
    engine = RliteTrainEngine(policy_module(model))
    engine.build()
    engine.save(tmp_path / "out")
    assert len([*(tmp_path / "out").glob("*.safetensors")]) == len(tensors_in(model))
    assert not difference(tensors_in(tmp_path / "out"), tensors_in(model))
    engine.release()
