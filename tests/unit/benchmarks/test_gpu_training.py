"""The GPU benchmark's own code, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_training import main


def test_it_measures_both_tasks_and_records_what_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--device", "cpu", "--shape", "tiny", "--packs", "2", "--steps", "2", "--out", str(tmp_path)]
    record = json.loads(main([*argv, "--gradient-checkpointing", "--offload-optimizer"]).read_text())
    assert record["hardware"] == "cpu"
    assert record["torch"] == torch.__version__
    assert record["settings"]["gradient_checkpointing"]
    assert record["results"].keys() == {"sft", "rl"}
    for result in record["results"].values():
        assert result["tokens_per_second"] > 0
        assert result["memory_gib"] > 0
        assert len(result["seconds"]) == len(result["losses"]) == 4
        assert "mfu" not in result
    losses = record["results"]["sft"]["losses"]
    assert losses[-1] < losses[0], "it trains"
    assert "sft at 64 tokens per pack" in capsys.readouterr().out


def test_without_a_gpu_it_says_so_and_fails() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="no CUDA device"):
        main([])
