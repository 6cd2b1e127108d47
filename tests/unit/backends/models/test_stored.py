"""A text model inside a multimodal checkpoint is read, and what is not trained goes into the export as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rlite.backends.models import architecture
from rlite.backends.models.architecture import check_fit
from rlite.backends.models.stored import StoredCheckpoint, stored_buffers, stored_form
from rlite.errors import CheckpointError, ConfigError, WeightSyncError
from rlite.nn.pretrained import causal_config, load_config, meta_model
from tests.unit.backends.models.small import CONTAINERS, container, held, tensors_in, text_model, written


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind == "gemma4")) for kind in CONTAINERS]
)
def test_the_text_model_of_a_container_computes_its_logits_and_goes_back(kind: str, tmp_path: Path) -> None:
    outer = container(kind)
    files = written(outer, tmp_path)
    on_meta = meta_model(load_config(tmp_path))
    reader = StoredCheckpoint(on_meta, tmp_path)
    check_fit(reader, tmp_path, on_meta)
    model = type(on_meta)(causal_config(load_config(tmp_path))).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *stored_buffers(model).items()):
            tensor.copy_(reader.read(name))
        ids = torch.randint(20, 100, (1, 11))
        assert torch.equal(model(input_ids=ids).logits, outer(input_ids=ids).logits)
    form = stored_form(model, reader, is_writer=True, drops=False)
    out = dict(form.conversion.stored(held(model).items()))
    out |= dict(form.untrained.tensors()) if form.untrained else {}
    assert out.keys() == files.keys()
    assert all(torch.equal(out[name], files[name]) for name in files)
    config, architecture = form.config(model.config, type(model).__name__)
    assert (type(config), architecture) == (type(outer.config), type(outer).__name__)
    assert config.text_config is model.config
    alone = stored_form(model, reader, is_writer=True, drops=True)
    assert alone.untrained is None
    assert alone.config(model.config, "TextOnly") == (model.config, "TextOnly")


def with_a_further_head(folder: Path) -> Path:
    written(text_model("qwen3_5_text"), folder)
    tensors = {**tensors_in(folder), "mtp.layers.0.mlp.up_proj.weight": torch.randn(4, 6).bfloat16()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_heads_for_further_tokens_are_copied_from_the_checkpoint(tmp_path: Path) -> None:
    model, folder = text_model("qwen3_5_text"), with_a_further_head(tmp_path)
    reader = StoredCheckpoint(model, folder)
    check_fit(reader, folder, model)
    form = stored_form(model, reader, is_writer=True, drops=False)
    assert form.untrained is not None
    copied = dict(form.untrained.tensors())
    name = "mtp.layers.0.mlp.up_proj.weight"
    assert copied.keys() == {name}
    assert torch.equal(copied[name], tensors_in(folder)[name])
    assert stored_form(model, reader, is_writer=True, drops=True).untrained is None


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_export_refuses_heads_that_are_gone_or_have_changed(tmp_path: Path, is_gone: bool) -> None:
    model, folder = text_model("qwen3_5_text"), with_a_further_head(tmp_path)
    form = stored_form(model, StoredCheckpoint(model, folder), is_writer=True, drops=False)
    tensors = tensors_in(folder)
    (folder / "model.safetensors").unlink()
    if not is_gone:
        tensors["mtp.layers.0.mlp.up_proj.weight"] += 1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert form.untrained is not None
    said = "cannot be read again" if is_gone else "has changed since"
    with pytest.raises(CheckpointError, match=rf"1 tensor .*mtp.layers.*{said}.*drop_untrained=true"):
        dict(form.untrained.tensors())


def test_float32_tensors_of_a_narrower_checkpoint_stay_float32(tmp_path: Path) -> None:
    model = text_model("qwen3_moe")
    files = {name: tensor.bfloat16() for name, tensor in written(model, tmp_path).items()}
    files["model.norm.weight"] = files["model.norm.weight"].float()
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    form = stored_form(model, StoredCheckpoint(model, tmp_path), is_writer=True, drops=False)
    assert form.wide == {"model.norm.weight"}


def test_a_block_of_experts_of_different_types_is_refused(tmp_path: Path) -> None:
    files = written(text_model("qwen3_moe"), tmp_path)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    save_file({**files, name: files[name].bfloat16()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reader = StoredCheckpoint(text_model("qwen3_moe"), tmp_path)
    with pytest.raises(CheckpointError, match=r"gate_up_proj is made of tensors of different types: .*bfloat16"):
        check_fit(reader, tmp_path, text_model("qwen3_moe"))


def test_a_container_is_compared_with_its_text_model_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    config = container("mistral3").config
    architecture.check_container(config)
    config = copy.deepcopy(config)
    config.image_token_index = 99  # another content: the first result is remembered
    monkeypatch.setattr(architecture, "places", lambda *args: {})  # then its text model has other weights
    with pytest.raises(ConfigError, match=r"Mistral3ForConditionalGeneration \('mistral3'\) changes the logits of"):
        architecture.check_container(config)


def test_experts_in_mxfp4_are_read_under_the_names_of_their_blocks(tmp_path: Path) -> None:
    model = text_model("gpt_oss")
    files, meant = written(model, tmp_path), {}
    for name in [name for name in files if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = files.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, rows, columns // 32), dtype=torch.uint8)
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configured(tmp_path, quantization_config={"quant_method": "mxfp4"})
    reader = StoredCheckpoint(model, tmp_path)
    check_fit(reader, tmp_path, model)
    assert meant
    for name, tensor in meant.items():
        assert torch.equal(reader.read(name), tensor)
        assert torch.equal(reader.read(name, (slice(1, 3), slice(5, 40), slice(2, 9))), tensor[1:3, 5:40, 2:9])
    form = stored_form(model, reader, is_writer=True, drops=False)
    assert dict(form.conversion.stored(held(model).items())).keys() == {*held(model)}


def test_experts_in_fp8_are_merged_after_they_are_scaled(tmp_path: Path) -> None:
    model = text_model("qwen3_moe")
    files, plain = written(model, tmp_path), {}
    for name in list(files):
        plain[name] = files[name]
        if "experts" in name:
            scales = torch.rand(-(-files[name].shape[0] // 8), -(-files[name].shape[1] // 8)) + 0.1
            files |= {name: files[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
            grid = scales.repeat_interleave(8, 0).repeat_interleave(8, 1)[
                : files[name].shape[0], : files[name].shape[1]
            ]
            plain[name] = (files[name].float() * grid).bfloat16()
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configured(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]})
    reader = StoredCheckpoint(model, tmp_path)
    check_fit(reader, tmp_path, model)
    name = "model.layers.1.mlp.experts.{}.{}_proj.weight"
    block = reader.read("model.layers.1.mlp.experts.gate_up_proj", (slice(1, 2), slice(0, 48), slice(0, 64)))
    halves = torch.cat([plain[name.format(1, "gate")], plain[name.format(1, "up")]])[None]
    assert torch.equal(block, halves[:, :48, :64])
    assert block.dtype == torch.bfloat16


def configured(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def test_weights_of_a_trainer_do_not_go_into_an_engine_with_quantised_ones(tmp_path: Path) -> None:
    files = written(text_model("qwen3"), tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    files |= {name: files[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configured(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(WeightSyncError, match=r"serves its quantised weights.*serve the export"):
        StoredCheckpoint(text_model("qwen3"), tmp_path).check_syncable()
