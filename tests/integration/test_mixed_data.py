"""Training on several tables: a run that was killed ends as one that was not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rlite
from rlite.assembly.supervised import read_tokens
from rlite.config import load
from rlite.observability import stats_tracker
from rlite.trainer.dpo import DpoTrainer
from rlite.trainer.supervised_options import DpoConfig
from tests.tiny import build_model_dir

CLOCKED = ("seconds", "tokens_per_second", "memory_gib")


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    yield
    rlite.shutdown()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talk(number: int, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(number)}, {"role": "assistant", "content": answer}]


def trainer(folder: Path, out: Path, *settings: str) -> DpoTrainer:
    """A trainer in a new session: 6 raw pairs and 18 conversations, half of each epoch from either."""
    options = load(
        DpoConfig,
        [
            *(f"actor.model_name={folder / 'model'}", "actor.lr=3e-3", "actor.gradient_checkpointing=false"),
            *(f"data.mixture.few.path={folder}/few.jsonl", "data.mixture.few.weight=1"),
            *(f"data.mixture.many.path={folder}/many.jsonl", "data.mixture.many.weight=1"),
            *("data.batch_size=8", "data.max_length=128", "trainer.n_epochs=3", "trainer.save_freq=2"),
            *(f"trainer.save_dir={out}", *settings),
        ],
    )
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    name = options.actor.model_name
    rows = read_tokens(options.data, options.test_data, name, DpoTrainer.tokenise, DpoTrainer.kind)
    return DpoTrainer(options, *rows)


def steps(out: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if not key.startswith(CLOCKED)} for row in rows]


def test_killed_run_on_a_mixture_resumes_bit_identically(tmp_path: Path) -> None:
    build_model_dir(tmp_path / "model", hidden=64)
    write(tmp_path / "few.jsonl", [{"prompt": f"{n}", "chosen": "yes", "rejected": "no"} for n in range(6)])
    write(tmp_path / "many.jsonl", [{side: talk(n, side) for side in ("chosen", "rejected")} for n in range(18)])
    trainer(tmp_path, tmp_path / "whole").fit()
    killed = trainer(tmp_path, tmp_path / "killed")
    killed.start()
    for _, batch in zip(range(5), killed.loader, strict=False):  # the newest checkpoint is of step 4
        with stats_tracker.record_timing("step"):
            stats = killed.update(killed.prepare(batch))
        killed.finish_step(batch, stats)
    killed.run.saved.held.close()
    trainer(tmp_path, tmp_path / "killed").fit()
    assert len(steps(tmp_path / "whole")) == 9
    assert steps(tmp_path / "killed") == steps(tmp_path / "whole")
    weights = [load_file(tmp_path / name / "latest" / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
