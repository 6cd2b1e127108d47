"""Refusals at build, and their messages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlite
from rlite import RliteInferenceEngine
from rlite.backends.vllm.process import root_cause
from rlite.errors import ConfigError, UnknownOptionError
from tests.tiny import build_model_dir

pytestmark = pytest.mark.timeout(840)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", hidden=64, head_dim=32)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    rlite.init(device="cpu", num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def test_engine_arguments_of_vllm_are_options_and_unknown_or_reserved_ones_are_refused(path: Path) -> None:
    engine = RliteInferenceEngine(path, executor="vllm")
    with pytest.raises(UnknownOptionError, match="did you mean 'enable_prefix_caching'"):
        engine.build(enable_prefix_cachin=True)
    for name in ("model", "generation_config", "logprobs_mode"):
        with pytest.raises((UnknownOptionError, ConfigError), match=name):
            engine.build(**{name: "x"})
    with pytest.raises(ConfigError, match="max_num_seqs"):
        engine.build(max_num_seqs=0)


def test_a_head_size_that_vllm_refuses_on_cpu_is_named_with_those_it_supports(tmp_path: Path) -> None:
    engine = RliteInferenceEngine(build_model_dir(tmp_path, hidden=64), executor="vllm")
    with pytest.raises(ConfigError, match=r"heads of size 16; it supports 32, 64, .*executor='torch'"):
        engine.build()


def test_a_model_class_that_vllm_does_not_know_is_named(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MyModel"]}))
    with pytest.raises(ConfigError, match=r"model class MyModel, which vLLM .* does not know"):
        RliteInferenceEngine(tmp_path, executor="vllm").build()


def test_too_little_memory_for_one_sequence_is_told_in_numbers(path: Path) -> None:
    engine = RliteInferenceEngine(path, executor="vllm")
    with pytest.raises(ConfigError, match=r"one sequence of max_model_len=1024 needs .* MiB of KV cache, .* available"):
        engine.build(max_model_len=1024, kv_cache_memory_bytes=2**18)


@pytest.mark.nightly
def test_a_failed_start_names_its_cause(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ConfigError, match=r"vLLM could not start on .*Safetensor") as caught:
        RliteInferenceEngine(tmp_path, executor="vllm").build(max_model_len=64)
    assert "Engine core initialization failed" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"max_model_len \(4096\) is greater"):
        RliteInferenceEngine(path, executor="vllm").build(max_model_len=4096)


def test_the_cause_of_a_failure_is_the_first_error_of_the_log() -> None:
    log = """(EngineCore pid=7) ERROR 11-22 10:00:00 [core.py:1] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-22 10:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-22 10:00:00 [core.py:1]     raise ValueError("no")
(EngineCore pid=7) ERROR 11-22 10:00:00 [core.py:1] ValueError: the model is too large: 3 GiB
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"""
    assert root_cause(log) == "ValueError: the model is too large: 3 GiB"
    assert root_cause("") is None
