"""The collector's results when rewards fail."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.rollout import (
    CollectorOptions,
    GenerationHyperparameters,
    RewardFunction,
    RolloutCollector,
    RolloutError,
    ScriptedEngine,
    SingleTurnWorkflow,
)
from rlite.runtime.sandbox.pool import close_shared_pool

TOKENIZER = byte_tokenizer()
WRONG = 9
"""the completion that fails where an item says how"""
ENDS = {
    "hang": "RewardTimeout",
    "exit": "RewardCrash",
    "eat": "RewardMemory",
    "raise": "RewardRaised",
    "none": "RewardInvalid",
}


@pytest.fixture(autouse=True, scope="module")
def _this_module_travels_by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    close_shared_pool()


def by_item(completion_ids: list[int], end: str | None = None, tries: str | None = None, **data: Any) -> Any:
    """1, unless the completion is WRONG: then it ends as the item says; with `tries`, only the first two times."""
    if completion_ids[0] != WRONG or end is None:
        return 1.0
    if tries is not None:
        with Path(tries).open("a") as file:
            file.write("x")
        if len(Path(tries).read_text()) > 2:
            return 0.5
    if end == "hang":
        time.sleep(3600)
    if end == "exit":
        os._exit(1)
    if end == "raise":
        raise ValueError("no")
    pieces = []
    while end == "eat":
        pieces.append(bytearray(b"x" * (4 << 20)))
    return None


def collect(items: list[dict[str, Any]], answers: list[list[int]], group_size: int, **options: Any) -> Any:
    """(the batch, the collector, which is closed, and the reward)"""
    reward = RewardFunction(by_item, timeout=3, memory_limit_gib=0.0625, num_processes=4)
    workflow = SingleTurnWorkflow(reward, GenerationHyperparameters(max_new_tokens=2), TOKENIZER)
    collector = RolloutCollector(ScriptedEngine(answers), CollectorOptions(**options))
    try:
        rows = [{"input_ids": [1, 2], **item} for item in items]
        return collector.rollout_batch(rows, workflow, group_size=group_size), collector, reward
    finally:
        collector.close()


def reasons(collector: RolloutCollector) -> Counter[str]:
    return Counter(reason.partition(":")[0] for reason in collector.lost.elements())


def test_a_group_whose_reward_fails_is_dropped_whole_with_that_reason_and_nothing_becomes_a_zero() -> None:
    items: list[dict[str, Any]] = [{}, *({"end": end} for end in ENDS), {}]
    batch, collector, reward = collect(items, [[8, 8], [WRONG, 8]], group_size=2, request_retries=0)
    assert batch["group_ids"].tolist() == [0, 0, 6, 6]
    assert batch["rewards"].tolist() == [1.0] * 4
    assert reasons(collector) == Counter(ENDS.values())
    failures = {"timeout": 1, "crash": 1, "memory": 1, "raised": 1, "invalid": 1}
    assert collector.failed_attempts == failures
    assert reward.outcomes - Counter(ok=100) == failures


def test_each_attempt_is_counted_by_its_outcome_until_the_budget_is_spent() -> None:
    items = [{"end": end} for end in ENDS]
    batch, collector, _ = collect([{}, *items], [[WRONG]], group_size=1, request_retries=2)
    assert len(batch) == 1
    assert collector.failed_attempts == {"timeout": 3, "crash": 3, "memory": 3, "raised": 3, "invalid": 3}
    assert reasons(collector) == Counter(ENDS.values())


def test_a_reward_that_succeeds_within_the_budget_is_kept(tmp_path: Path) -> None:
    items = [{"end": end, "tries": str(tmp_path / end)} for end in ENDS]
    batch, collector, _ = collect(items, [[WRONG]], group_size=1, request_retries=2)
    assert batch["rewards"].tolist() == [0.5] * len(ENDS)
    assert collector.failed_attempts == {"timeout": 2, "crash": 2, "memory": 2, "raised": 2, "invalid": 2}
    assert not collector.lost


def test_rewards_that_all_fail_stop_the_run_with_the_reason() -> None:
    with pytest.raises(
        RolloutError, match=r"[4-8] groups in a row failed, the last with RewardRaised: (.|\n)*ValueError: no"
    ):
        collect([{"end": "raise"}] * 8, [[WRONG]], group_size=1, request_retries=1, max_consecutive_failures=4)
