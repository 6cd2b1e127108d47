"""Metrics that a module records on its workers arrive in the program's stats_tracker, however the work is split."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from rlite import NeedParallel, RliteTrainEngine, stats_tracker
from tests.integration.modules import Policy, make_batch, num_counted, on_meta, token_loss
from tests.integration.worlds import world

ROWS = [[7 * i + k * k for k in range(1 + i)] for i in range(9)]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(4):
        yield


class Recorder(Policy, Qwen2ForCausalLM):
    def look_at(self, rows: list[list[int]]) -> int:
        with stats_tracker.scope("rows"), stats_tracker.record_timing("look"):
            for row in rows:
                values = torch.tensor(row) / 8
                stats_tracker.denominator(tokens=values > 0, odd=values * 8 % 2 == 1)
                stats_tracker.stat(denominator="tokens", value=values)
                stats_tracker.stat(denominator="odd", odd_value=values)
                stats_tracker.scalar(length=len(row))
            time.sleep(0.01)
        return len(rows)

    def look_at_tokens(self, ids: Tensor) -> None:
        stats_tracker.denominator(tokens=torch.ones_like(ids))
        stats_tracker.stat(denominator="tokens", value=ids / 8)


def recorded(values: list[float]) -> dict[str, float]:
    return {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}


EXPECTED = {
    "actor/rows/length": sum(map(len, ROWS)) / len(ROWS),
    "actor/rows/odd": float(sum(v % 2 for row in ROWS for v in row)),
    "actor/rows/tokens": float(sum(v > 0 for row in ROWS for v in row)),
    **{f"actor/rows/value/{k}": v for k, v in recorded([v / 8 for row in ROWS for v in row if v]).items()},
    **{f"actor/rows/odd_value/{k}": v for k, v in recorded([v / 8 for row in ROWS for v in row if v % 2]).items()},
}


def loss_that_records(logits: Tensor, data: dict[str, Any]) -> Tensor:
    stats_tracker.denominator(tokens=data["loss_mask"].bool())
    stats_tracker.stat(denominator="tokens", id=data["input_ids"].double())
    return token_loss(logits, data)


@pytest.mark.parametrize(
    ("size", "copies", "options"),
    [(1, 1, {}), (3, 1, {}), (2, 2, {}), (2, 1, {"tp_size": 2}), (4, 1, {"sp_size": 2})],
    ids=["alone", "3 shards", "2 copies of 2", "tp 2", "sp 2 of 4"],
)
def test_every_element_counts_once_for_any_number_of_ranks(
    models: dict[str, Path], size: int, copies: int, options: dict[str, Any]
) -> None:
    engine = RliteTrainEngine(on_meta(Recorder, models["qwen2"]))
    engine.build(
        tensor_parallel_size=size,
        data_parallel_size=copies,
        max_tokens_per_microbatch=16,
        gradient_checkpointing=False,
        **options,
    )
    stats_tracker.export()
    with stats_tracker.scope("actor"):
        engine.look_at(NeedParallel(ROWS))
    report = stats_tracker.export()
    assert report.pop("actor/rows/timeperf/look") >= 0.01
    assert report == EXPECTED

    ids = torch.arange(24).view(1, 24)
    if engine.num_data_ranks == 1 or options:
        engine.look_at_tokens(NeedParallel(ids, type="seq"))
        report = stats_tracker.export()
        assert report["value/mean"] == ids.double().mean().item() / 8
        assert report["tokens"] == 24 * engine.num_data_ranks  # all see the sequence

    for lengths in ([5, 9, 14, 3, 7, 7, 12, 2], [6]):  # the last leaves ranks without a row of their own
        batch = make_batch(lengths)
        counted = [float(v) for v in batch["input_ids"][batch["loss_mask"].bool()]]
        for call in (engine.train_batch, engine.eval_batch):
            call(batch, loss_that_records, num_counted)
            expected = {f"id/{k}": v for k, v in recorded(counted).items()}
            assert stats_tracker.export() == {**expected, "tokens": float(len(counted))}
    engine.release()
