"""Refusals of Liger's kernels; the GPU tests check their results."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlite
from rlite.backends.models.linear import check_liger
from rlite.errors import ConfigError
from rlite.trainer.model.modules import policy_module
from tests.tiny import build_model_dir


def test_an_engine_on_cpu_devices_refuses_them_before_it_starts_anything(tmp_path: Path) -> None:
    engine = rlite.RliteTrainEngine(policy_module(build_model_dir(tmp_path / "model")))
    rlite.init(num_devices=1)
    try:
        with pytest.raises(ConfigError, match="use_liger_kernel=true needs GPUs"):
            engine.build(use_liger_kernel=True)
        assert not engine.is_built
    finally:
        rlite.shutdown()


def test_without_the_package_the_remedy_is_named(tmp_path: Path) -> None:
    try:
        import liger_kernel  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'rlite\[liger\]'"):
            check_liger(policy_module(build_model_dir(tmp_path / "model")), "cuda")
    else:
        pytest.skip("the package is here")
