"""Programs of `examples/contracts/`, run in this process with a small model, one step and short answers."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.games import PEERS
from tests.tiny import build_model_dir
from tests.unit.rollout.contracts.tool_template import TOKENIZER

FOLDER = Path(__file__).parents[2] / "examples" / "contracts"
MODEL = 'model="Qwen/Qwen3-0.6B"'
SMALL = {
    "train_data.prompts_per_rollout": 2,
    "train_data.responses_per_prompt": 2,
    "rollout.train_sampling_params.max_new_tokens": 8,
    "rollout.dynamic_filtering": False,
    "rollout.max_model_len": 2048,
}


def make_model(folder: Path) -> str:
    """Make a small model whose chat template shows tools, and return its folder."""
    build_model_dir(folder, "qwen3", hidden=64)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def train(program: str, model: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a shortened program as a command, and return the metrics of its step."""
    text = (FOLDER / f"{program}.py").read_text()
    assert text.count(MODEL) == 1
    small = f'model="{model}", num_devices=1, total_steps=1, save_dir="{folder / "run"}", **{SMALL}'
    text = text.replace("    import gem\n", f"    import sys\n\n    sys.path.append({str(PEERS)!r})\n    import gem\n")
    text = text.replace(', "renderer": {"name": "qwen3"}', "")  # it needs Qwen3's special tokens
    (folder / f"{program}.py").write_text(text.replace(MODEL, small))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *arguments])
        runpy.run_path(str(folder / f"{program}.py"), run_name="__main__")
    (line,) = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["response_length"] > 0
    assert metrics["rollout/num_lost"] == 0
    return metrics
