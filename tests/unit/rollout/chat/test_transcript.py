from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlite.data.packs import check_trajectory, first_rows, last_rows
from rlite.errors import DataError
from rlite.rollout import (
    GenerationHyperparameters,
    LLMRequest,
    RolloutCollector,
    RolloutError,
    RolloutWorkflow,
    ScriptedEngine,
    Transcript,
)

SAMPLING = GenerationHyperparameters(max_new_tokens=4)


class Duel(RolloutWorkflow):
    """Two players with one policy, each of whom reads its own sequence."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        transcript = Transcript([1, 2])
        await transcript.generate(engine, SAMPLING)
        transcript.reward(0.5)
        transcript.begin([3])
        await transcript.generate(engine, SAMPLING)
        transcript.read([4, 5])
        await transcript.generate(engine, SAMPLING)
        transcript.reward(-0.25)
        return transcript.trajectory(**data)


def test_sequences_of_one_episode_are_one_trajectory() -> None:
    requests: list[LLMRequest] = []

    def answer(request: LLMRequest) -> list[int]:
        requests.append(request)
        return [10 * len(requests), 11 * len(requests)]

    rows = asyncio.run(Duel().arun_episode(ScriptedEngine(answer, version=3), {}))
    check_trajectory(rows)
    assert rows["input_ids"].tolist() == [[1, 2, 10, 11, 0, 0, 0], [3, 20, 22, 4, 5, 30, 33]]
    assert rows["loss_mask"].int().tolist() == [[0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 1, 1]]
    assert rows["versions"].tolist() == [[-1, -1, 3, 3, -1, -1, -1], [-1, 3, 3, -1, -1, 3, 3]]
    assert rows["token_rewards"][0, 3] == 0.5
    assert rows["token_rewards"][1, 6] == -0.25
    assert rows["token_rewards"].count_nonzero() == 2
    assert rows["rewards"].tolist() == [0.25, 0.25]
    assert rows["num_turns"].tolist() == [3, 3]
    assert [request.input_ids for request in requests] == [[1, 2], [3], [3, 20, 22, 4, 5]]
    assert len({request.rid for request in requests}) == 1


def test_an_outcome_replaces_the_rewards_of_turns_and_groups_count_trajectories() -> None:
    collector = RolloutCollector(ScriptedEngine([[7]]))
    try:
        batch = collector.rollout_batch([{"reward": 1.0, "effort": 2.0}, {"reward": 2.0, "effort": 3.0}], Duel(), 2)
    finally:
        collector.close()
    assert "token_rewards" not in batch
    assert batch["group_ids"].tolist() == [batch["group_ids"][0].item()] * 4 + [batch["group_ids"][4].item()] * 4
    first = first_rows(batch)
    assert first.tolist() == [0, 2, 4, 6]
    assert last_rows(batch).tolist() == [1, 3, 5, 7]
    assert batch["rewards"][first].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert batch["effort"][first].tolist() == [2.0, 2.0, 3.0, 3.0]


def test_a_sequence_without_room_is_truncated_and_one_without_an_answer_is_none() -> None:
    async def episode() -> Any:
        transcript = Transcript([1, 2], max_length=5)
        engine = ScriptedEngine([[7, 8, 9, 10]])
        response = await transcript.generate(engine, SAMPLING)
        assert response is not None
        assert response.output_tokens == [7, 8, 9]
        assert response.stop_reason == "length"
        transcript.begin([1, 2, 3, 4, 5])
        assert await transcript.generate(engine, SAMPLING) is None
        assert transcript.tokens == [1, 2, 7, 8, 9]
        return transcript.trajectory()

    rows = asyncio.run(episode())
    assert rows["input_ids"].tolist() == [[1, 2, 7, 8, 9]]
    assert rows["truncated"].tolist() == [True]


def test_invalid_calls_are_refused() -> None:
    with pytest.raises(DataError, match="a prompt has no tokens"):
        Transcript([])
    with pytest.raises(DataError, match="3 tokens: no room for an answer in 3"):
        Transcript([1, 2, 3], max_length=3)
    transcript = Transcript([1])
    with pytest.raises(RolloutError, match="the model has written nothing"):
        transcript.trajectory()
    with pytest.raises(RolloutError, match="a reward belongs to a turn of the model"):
        transcript.reward(1.0)
    asyncio.run(transcript.generate(ScriptedEngine([[7]]), SAMPLING))
    transcript.reward(float("nan"))
    with pytest.raises(DataError, match="token_rewards holds a value that is not finite"):
        transcript.trajectory()
