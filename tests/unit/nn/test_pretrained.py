from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.model import ShardedModel
from rlite.errors import CheckpointError, ConfigError, RliteError
from rlite.nn.pretrained import end_ids, load_config, load_model, load_tokenizer, make_model
from rlite.runtime.parallel.shards import CheckpointReader
from rlite.trainer.model.modules import critic_module, policy_module
from tests.tiny import build_model_dir


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "sound", hidden=32)


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


STRANGE: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda place: place.symlink_to("/dev/zero"),
    "loop of links": lambda place: place.symlink_to(place.name),
    "broken": lambda place: place.write_text("{"),
    "nested": lambda place: place.write_text('{"a":' * 20_000),
    "list": lambda place: place.write_text("[1]"),
    "binary": lambda place: place.write_bytes(b"\xff\xfe\x00"),
}
READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": load_config,
    "tokenizer.json": load_tokenizer,
    "generation_config.json": lambda model: end_ids(model, make_model(load_config(model)).config),
    "model.safetensors": lambda model: CheckpointReader(model).names(),
    "model.safetensors.index.json": lambda model: CheckpointReader(model).names(),
}


@pytest.mark.parametrize("file", READERS)
@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_file_is_one_message(model: Path, file: str, kind: str) -> None:
    (model / file).unlink(missing_ok=True)
    STRANGE[kind](model / file)
    with pytest.raises(RliteError) as refused:
        READERS[file](model)
    assert str(model) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"hidden_size": -4},
        {"hidden_size": 2**40},
        {"vocab_size": 10**30},
        {"num_hidden_layers": 10**6, "layer_types": None},
        {"num_attention_heads": 0},
        {"model_type": None},
        {"model_type": "unheard_of"},
        {"dtype": "float3"},
        {"hidden_act": "none of these"},
    ],
    ids=str,
)
def test_a_config_that_nobody_can_use_is_refused_by_training_and_serving(model: Path, changes: dict[str, Any]) -> None:
    edit(model / "config.json", **changes)
    with pytest.raises(CheckpointError, match="no usable config") as refused:
        policy_module(model)
    assert "\n" not in str(refused.value)
    with pytest.raises(CheckpointError, match="no usable config"):
        make_model(load_config(model))


@pytest.mark.parametrize("is_nested", [False, True], ids=["all layers", "by kind of layer"])
def test_an_unknown_kind_of_rotary_embedding_is_named_by_training_and_serving(model: Path, is_nested: bool) -> None:
    rope: dict[str, Any] = {"rope_type": "foo", "rope_theta": 1e4, "factor": 2.0}
    edit(model / "config.json", rope_parameters={"full_attention": rope} if is_nested else rope)
    if is_nested:  # older releases of transformers read a base of all layers beside the kinds as one of them
        edit(model / "config.json", rope_theta=None)
    for load in (policy_module, critic_module, load_config, partial(load_model, AutoModelForCausalLM)):
        with pytest.raises(
            CheckpointError, match=r"rope_type is 'foo'; expected one of default, linear,.* yarn"
        ) as told:
            load(model)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("part", [None, "AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
def test_a_folders_own_code_is_neither_run_nor_asked_about(
    model: Path, part: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    (model / "code.py").write_text(f"import pathlib\npathlib.Path({str(model / 'mark')!r}).touch()\n")
    parts = {part: "code.Stranger"} if part else {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    edit(model / "config.json", auto_map=parts)
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.T", None]})
    with caplog.at_level(logging.WARNING):
        make_model(load_config(model))
        load_model(AutoModelForCausalLM, model)
        load_tokenizer(model)
        policy_module(model)
    assert caplog.text.count("names code of its own (auto_map") == 1  # once for each folder
    edit(model / "config.json", model_type="unheard_of")
    if parts.get("AutoConfig"):
        with pytest.raises(ConfigError, match="needs code of its own"):
            load_config(model)
    assert not (model / "mark").exists()


@pytest.mark.parametrize("name", ["kernels-community/flash-attn", "stranger/repo:function", "flash_attention_2"])
def test_the_attention_of_a_strangers_config_is_not_used(model: Path, name: str) -> None:
    edit(model / "config.json", attn_implementation=name, experts_implementation=name)
    config = load_config(model)
    assert config._attn_implementation is None
    assert make_model(config).config._attn_implementation in ("sdpa", "eager")
    assert policy_module(model).config._attn_implementation in ("sdpa", "eager")
    assert load_model(AutoModelForCausalLM, model).config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {"x": 1}}},
        {"model": {"type": "Unigram", "unk_id": 99, "vocab": [["a", 0.0]], "byte_fallback": False}},
        {"model": None},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
    ],
    ids=str,
)
def test_a_tokenizer_that_the_parser_does_not_survive_is_refused(model: Path, changes: dict[str, Any]) -> None:
    edit(model / "tokenizer.json", **changes)
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        load_tokenizer(model)


def test_a_large_rotary_base_is_no_size(model: Path) -> None:
    edit(model / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 3580165449 * 10})
    assert load_config(model).rope_parameters["rope_theta"] > 2**31


def test_a_tokenizer_with_very_many_added_tokens_is_refused_at_once(model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    first = content["added_tokens"][0]
    content["added_tokens"] += [{**first, "id": 300 + i, "content": f"<{i}>"} for i in range(30_000)]
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="adds 30003 tokens"):
        load_tokenizer(model)


@pytest.mark.parametrize("place", ["../part.safetensors", "/etc/passwd", "sub/part.safetensors", "gone.safetensors"])
def test_an_index_names_files_beside_it(model: Path, place: str) -> None:
    (model / "model.safetensors").rename(model.parent / "part.safetensors")
    index = {"weight_map": {"model.norm.weight": place}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names the file|cannot be read"):
        CheckpointReader(model).shape("model.norm.weight")


def test_a_cut_file_is_refused(model: Path) -> None:
    os.truncate(model / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        ShardedModel(str(model), EmbeddedOptions(dtype="float32"), torch.device("cpu"), None).load()
