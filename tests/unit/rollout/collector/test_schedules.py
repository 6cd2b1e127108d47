"""The collector in random schedules: workflows that fail, groups that are refused, pauses, updates and restarts."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlite.rollout import CollectorOptions, LLMRequest, RolloutCollector, RolloutWorkflow, ScriptedEngine, trajectory

UPDATES = 10
SECONDS = 20.0
"""after which a batch that is not there is a deadlock"""


class Unreliable(RolloutWorkflow):
    """One answer to an item's number, or an exception."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.failures = draw, draw.choice([0.0, 0.1, 0.3])

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        response = await engine.agenerate(LLMRequest(input_ids=[1]))
        if self.draw.random() < self.failures:
            raise LookupError(data["number"])
        row = trajectory(response, reward=1.0)
        row["number"] = torch.tensor([data["number"]])
        return row


class Numbers:
    """A loader that continues from its position for any reader, like a trainer's position in its data."""

    def __init__(self) -> None:
        self.count = itertools.count()

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"number": number} for number in self.count)


@pytest.mark.parametrize("seed", range(25))
def test_no_item_is_lost_or_used_twice_or_too_old_and_no_batch_stays_away(seed: int) -> None:
    draw = random.Random(seed)
    size, siblings, eta = draw.randint(1, 4), draw.randint(1, 3), draw.randint(0, 3)
    on_stale: Any = draw.choice(["wait", "drop"])
    options = CollectorOptions(
        consumer_batch_size=size,
        max_head_offpolicyness=eta,
        max_concurrent_rollouts=draw.randint(1, 12),
        on_stale=on_stale,
        request_retries=1,
        max_consecutive_failures=10**6,
    )
    refusals = draw.choice([0.0, 0.3])
    workflow, loader, used = Unreliable(draw), Numbers(), set[int]()

    def is_accepted(group: TensorDict) -> bool:
        return draw.random() >= refusals

    def begin(version: int) -> RolloutCollector:
        engine = ScriptedEngine(
            lambda request: [5] * draw.randint(1, 6), lambda request: draw.choice([0, 0.001, 0.01]), version=version
        )
        return RolloutCollector(engine, options)

    collector = begin(0)
    try:
        for version in range(UPDATES):
            if draw.random() < 0.2:
                saved = io.BytesIO()
                torch.save(collector.state_dict(), saved)
                collector.close()
                collector = begin(version)
                saved.seek(0)
                collector.load_state_dict(torch.load(saved), workflow, is_accepted)
            if draw.random() < 0.2:
                collector.pause()
                collector.resume()
            batch = collector.prepare_batch(loader, workflow, is_accepted, siblings, timeout=SECONDS)
            groups = batch["number"].view(size, siblings)
            assert (groups == groups[:, :1]).all(), "groups are whole"
            assert (version - batch["versions"][batch["loss_mask"]]).max() <= eta, "no token is too old"
            assert used.isdisjoint(groups[:, 0].tolist()), "nothing is used twice"
            used.update(groups[:, 0].tolist())
            collector.engine.set_version(version + 1)  # type: ignore[attr-defined]
            collector.version_changed()
        left = {group["data"]["number"] for group in collector.state_dict()["groups"]}
        assert used.isdisjoint(left)
        assert len(used) + len(left) + collector.lost.total() == next(loader.count), "every item is somewhere"
        assert on_stale == "drop" or not collector.lost["too old"], "who waits loses none to age"
    finally:
        collector.close()
