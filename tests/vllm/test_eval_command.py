"""`rlite eval` with vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlite
from rlite.assembly.evaluate.command import main
from tests.tiny import build_model_dir

pytestmark = pytest.mark.timeout(840)
REWARD = """
def even(prompt, completions, prompt_ids, completion_ids, **row):
    return float(len(completion_ids) % 2 == 0)
"""


@pytest.mark.nightly
def test_a_checkpoint_is_evaluated_with_vllm(tmp_path: Path) -> None:
    model = build_model_dir(tmp_path / "qwen3", "qwen3", hidden=64, head_dim=32)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}+{n}="}}\n' for n in range(3)))
    (tmp_path / "reward.py").write_text(REWARD)
    sources = ["--data", f"{tmp_path}/rows.jsonl", "--reward", f"{tmp_path}/reward.py:even"]
    sizes = ["max_new_tokens=4", "max_num_seqs=4", "max_model_len=32", "num_devices=1", "reward.in_process=true"]
    try:
        main([str(model), *sources, *sizes, "executor=vllm", "--samples", "2", "--out", f"{tmp_path}/out"])
    finally:
        rlite.shutdown()
    [found] = json.loads((tmp_path / "out/results.json").read_text())["models"].values()
    assert {"accuracy", "standard_error", "pass@2"} <= found["metrics"].keys()
    assert found["metrics"]["num_errors"] == 0
    _, *lines = map(json.loads, (tmp_path / "out/samples/qwen3.jsonl").read_text().splitlines())
    assert sorted((line["item"], line["sample"]) for line in lines) == [(str(n), s) for n in range(3) for s in range(2)]
    assert all(line["tokens"][0]["ids"] for line in lines), "of the first prompts"
