"""A checkpoint that holds something else than the model is refused by training and serving, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.backends.models.lora import merge_adapter
from rlite.errors import CheckpointError
from rlite.runtime.cluster.session import Session
from rlite.trainer.model.modules import critic_module, policy_module
from tests.integration.worlds import world
from tests.mixtures import build_mixture_dir
from tests.tiny import build_model_dir

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(1):
        yield


def written(folder: Path, change: Callable[[Tensors], Any], **config: Any) -> Path:
    """A tied tiny model with other tensors and config values."""
    path = build_model_dir(folder / "model", hidden=32)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, **config}))
    return path


def build(path: Path, role: str) -> None:
    engine: Any
    if role == "serve":
        engine = RliteInferenceEngine(path)
    else:
        engine = RliteTrainEngine((policy_module if role == "train" else critic_module)(path))
    try:
        engine.build()
    finally:
        engine.release()


def projections(tensors: Tensors) -> list[str]:
    return [name for name in tensors if name.endswith("proj.weight")]


def typed(dtype: torch.dtype) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype) for name in projections(tensors)})


def added(ending: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name + ending: torch.ones(1) for name in projections(tensors)})


QUANTISED: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any]]] = {
    "fp8 by its config": (lambda tensors: None, {"quantization_config": {"quant_method": "fp8"}}),
    "bitsandbytes by its config": (lambda tensors: None, {"quantization_config": {"load_in_4bit": True}}),
    "old compressed-tensors": (lambda tensors: None, {"compression_config": {"format": "int"}}),
    "fp8 by its types": (typed(torch.float8_e4m3fn), {}),
    "int8 by its types": (typed(torch.int8), {}),
    "fp8 by its scales": (added("_scale_inv"), {}),
    "compressed-tensors by its scales": (added("_scale"), {}),
    "bitsandbytes by its scales": (added(".absmax"), {}),
    "gptq by its names": (added(".g_idx"), {}),
}


@pytest.mark.parametrize("role", ["serve", "train", "critic"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_checkpoint_is_refused_with_the_remedy(tmp_path: Path, kind: str, role: str) -> None:
    change, config = QUANTISED[kind]
    with pytest.raises(CheckpointError, match=r"model: the checkpoint is quantised \(.*dequantize\(\)"):
        build(written(tmp_path, change, **config), role)


def test_an_adapter_is_not_merged_into_a_quantised_base(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = written(tmp_path, lambda tensors: None, quantization_config={"quant_method": "fp8"})
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="quantised"):
        merge_adapter(tmp_path, str(path), tmp_path / "out")


REFUSED: dict[str, tuple[str, Callable[[Tensors], Any]]] = {
    "a layer more": ("serve train critic", lambda held: held.update({"model.layers.9.mlp.up_proj.weight": held[HEAD]})),
    "a bias": ("serve train critic", lambda held: held.update({"model.layers.0.mlp.up_proj.bias": held[HEAD][0]})),
    "an adapter": ("serve train critic", lambda held: held.update({"model.layers.0.q.lora_A.weight": held[HEAD]})),
    "another head": ("serve train", lambda held: held.update({HEAD: held[EMBEDDING] + 1})),
    "a scorer's head": ("serve train", lambda held: held.update({"score.weight": held[HEAD][:1].clone()})),
}


@pytest.mark.parametrize(("kind", "role"), [(kind, role) for kind in REFUSED for role in REFUSED[kind][0].split()])
def test_a_tensor_that_would_be_left_out_is_refused(tmp_path: Path, kind: str, role: str) -> None:
    def change(held: Tensors) -> None:
        held[HEAD] = held[EMBEDDING].clone()
        REFUSED[kind][1](held)
        if kind not in ("another head", "a scorer's head"):
            held[EMBEDDING], held[HEAD] = held[HEAD].clone(), held[HEAD].clone()

    message = "holds two different tensors" if kind == "another head" else r"it holds 1 tensor that .* does not have"
    with pytest.raises(CheckpointError, match=message):
        build(written(tmp_path, change), role)


@pytest.mark.parametrize("role", ["serve", "train", "critic"])
def test_what_every_program_leaves_out_is_read_as_before(tmp_path: Path, role: str) -> None:
    def change(held: Tensors) -> None:
        held[HEAD] = held[EMBEDDING].clone()  # equal to the embedding that it is tied to
        held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # of old checkpoints

    build(written(tmp_path, change), role)


def test_weights_that_are_loaded_later_are_compared_too(tmp_path: Path) -> None:
    sound = build_model_dir(tmp_path / "sound", hidden=32)
    other = written(tmp_path, lambda held: held.update({"model.layers.0.mlp.up_proj.bias": torch.ones(96)}))
    for engine in (RliteInferenceEngine(sound), RliteTrainEngine(policy_module(sound))):
        engine.build()
        with pytest.raises(CheckpointError, match="it holds 1 tensor that"):
            engine.load(other)
        engine.release()


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("role", ["serve", "train", "critic"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop(UP), rf"no tensor named '{UP}'"),
        (
            lambda held: held.update({UP: torch.ones(5, 32)}),
            rf"{UP}: the model needs shape \(96, 32\), .* has \(5, 32\)",
        ),
    ],
    ids=["missing", "of another shape"],
)
def test_a_tensor_that_does_not_fit_is_named_before_a_process_starts(
    tmp_path: Path, role: str, change: Callable[[Tensors], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "place", lambda *args, **kwargs: pytest.fail("devices were taken"))
    with pytest.raises(CheckpointError, match=message):
        build(written(tmp_path, change), role)


@pytest.mark.parametrize("role", ["serve", "train"])
def test_a_missing_expert_is_named_with_its_conversion_before_a_process_starts(
    tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_mixture_dir(tmp_path / "model", "qwen3_moe")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(Session, "place", lambda *args, **kwargs: pytest.fail("devices were taken"))
    with pytest.raises(
        CheckpointError, match=r"by MergeModulelist and Concatenate.* no tensor matches mlp.experts.5.up"
    ):
        build(path, role)
