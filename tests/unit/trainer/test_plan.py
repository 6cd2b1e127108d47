"""A dry run plans a model of 72 billion parameters on 64 devices, on this machine, in seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen2Config

NUM_PARAMETERS = 72_706_203_648  # of Qwen2.5-72B


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2-72b")
    shape = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "vocab_size": 152064}
    Qwen2Config(num_attention_heads=64, num_key_value_heads=8, tie_word_embeddings=False, **shape).save_pretrained(path)
    return path


@pytest.mark.parametrize("sizes", [["tp_size=8"], ["sp_size=4"], ["tp_size=4", "sp_size=2", "ddp_size=2"]])
def test_every_byte_is_divided_over_the_devices_of_a_copy(model: Path, sizes: list[str]) -> None:
    command = [sys.executable, "-m", "rlite.trainer.plan", f"model_name={model}", "num_devices=64", *sizes]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    assert "72.71 B parameters" in ran.stdout
    devices = 32 if "ddp_size=2" in sizes else 64
    (line,) = (line for line in ran.stdout.splitlines() if "weights, float32, per device" in line)
    weights = int(line.partition("(")[2].partition(" ")[0])
    assert weights == pytest.approx(NUM_PARAMETERS * 4 / devices, rel=1e-3)


def test_sizes_that_do_not_divide_are_refused(model: Path) -> None:
    command = [sys.executable, "-m", "rlite.trainer.plan", f"model_name={model}", "num_devices=64", "tp_size=16"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ran.returncode != 0
    assert "num_key_value_heads=8" in ran.stderr
