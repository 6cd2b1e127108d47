from __future__ import annotations

import asyncio
from typing import Any

import torch
from tensordict import TensorDict

from rlite.rollout.collector.calls import RolloutCollector
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.workflow import RolloutWorkflow
from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse, OnChunk


class Recorder:
    """An engine that answers after a while and remembers the seeds, by (item, turn)."""

    def __init__(self, version: int, delays: list[float]) -> None:
        self._version = version
        self._delays = delays
        self.seeds: list[tuple[int, int | None]] = []
        self.rids: list[tuple[int, str]] = []
        self.asked: list[tuple[str, ...]] = []
        self.extras = frozenset({"kept_ids"})

    async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
        self.seeds.append((request.input_ids[0], request.gconfig.seed))
        self.rids.append((request.input_ids[0], request.rid))
        self.asked.append(request.extras)
        await asyncio.sleep(self._delays[len(self.seeds) % len(self._delays)])
        return LLMResponse(
            input_tokens=request.input_ids,
            output_tokens=[1],
            output_logprobs=[0.0],
            output_versions=[self._version],
            stop_reason="stop",
            latency=0.0,
            ttft=0.0,
        )

    def get_version(self) -> int:
        return self._version

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class TwoTurns(RolloutWorkflow):
    def __init__(self, seed: int | None = None, **sampling: Any) -> None:
        self.gconfig = GenerationHyperparameters(seed=seed, **sampling)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        for _ in range(2):
            await engine.agenerate(LLMRequest(input_ids=[data["item"]], gconfig=self.gconfig))
        row = torch.ones(1, 2, dtype=torch.long)
        return TensorDict(
            {"input_ids": row, "attention_mask": row, "loss_mask": row, "rewards": torch.ones(1)}, batch_size=[1]
        )


def seeds(
    version: int, delays: list[float], seed: int | None = 5, own: int | None = None, group_size: int = 3
) -> list[tuple[int, int | None]]:
    engine = Recorder(version, delays)
    collector = RolloutCollector(engine, CollectorOptions(seed=seed))
    collector.rollout_batch([{"item": item} for item in range(4)], TwoTurns(own), group_size=group_size)
    collector.close()
    return sorted(engine.seeds, key=str)


def test_seed_of_each_request_is_independent_of_the_order_of_answers() -> None:
    found = seeds(2, [0.0])
    assert len({seed for _, seed in found}) == 4 * 3 * 2
    assert seeds(2, [0.0, 0.01, 0.003]) == found
    assert not {seed for _, seed in found} & {seed for _, seed in seeds(3, [0.0])}, "another version draws others"


def test_without_a_seed_requests_are_left_as_they_are() -> None:
    assert {seed for _, seed in seeds(2, [0.0], seed=None)} == {None}


def test_siblings_of_a_fixed_seed_draw_differently_and_always_the_same() -> None:
    found = seeds(2, [0.0], own=7)
    assert len({seed for _, seed in found}) == 3, "one for each sample of a group, whatever the item and the turn"
    assert seeds(3, [0.0, 0.01], seed=None, own=7) == found
    assert {seed for _, seed in seeds(2, [0.0], own=7, group_size=1)} == {7}, "which is what one request alone gets"


def test_siblings_share_one_affinity_key_and_single_episodes_keep_theirs() -> None:
    engine = Recorder(0, [0.0])
    collector = RolloutCollector(engine, CollectorOptions())
    for size, num_keys in ((3, 2), (1, 4)):  # two items, two turns each
        engine.rids.clear()
        collector.rollout_batch([{"item": item} for item in range(2)], TwoTurns(), group_size=size)
        assert len({rid for _, rid in engine.rids}) == num_keys
        assert len({item for item, _ in engine.rids}) == 2
    collector.close()


def test_episodes_that_truncate_ask_for_kept_ids_if_they_are_trained_on_and_the_engine_has_them() -> None:
    engine, items = Recorder(0, [0.0]), [{"item": 1}]
    collector = RolloutCollector(engine, CollectorOptions())
    for sampling in ({"top_p": 0.9}, {"top_k": 5}):
        collector.rollout_batch(items, TwoTurns(**sampling))
    assert engine.asked == [("kept_ids",)] * 4
    engine.asked.clear()
    collector.rollout_batch(items, TwoTurns())
    collector.rollout_batch(items, TwoTurns(top_p=0.9, greedy=True))
    collector.evaluate(items, TwoTurns(top_p=0.9))
    engine.extras = frozenset()
    collector.rollout_batch(items, TwoTurns(top_p=0.9))
    assert engine.asked == [()] * 8
    collector.close()
