"""A stranger's folder of an adapter is refused with a reason, and never waited for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlite.errors import CheckpointError
from rlite.runtime.replicas.adapters import CONFIG, MAX_JSON, WEIGHTS, AdapterWeights
from rlite.runtime.storage.atomic import FACTS


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.write_text(" " * MAX_JSON + "{}")


def a_list(file: Path) -> None:
    file.write_text("[]" if file.name == CONFIG else "[1]")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (CONFIG, pipe),
        (WEIGHTS, pipe),
        (FACTS, pipe),
        (CONFIG, endless),
        (FACTS, endless),
        (CONFIG, a_list),
        (FACTS, a_list),
    ],
)
@pytest.mark.timeout(20)
def test_a_strange_file_of_an_adapter_is_refused(name: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"r": 1, "lora_alpha": 2}))
    layer = "base_model.model.layer.lora_"
    save_file({f"{layer}A.weight": torch.ones(1, 2), f"{layer}B.weight": torch.ones(3, 1)}, tmp_path / WEIGHTS)
    assert AdapterWeights.read(tmp_path).rank == 1
    damage(tmp_path / name)
    with pytest.raises(CheckpointError, match="no usable adapter in PEFT's format"):
        AdapterWeights.read(tmp_path)
