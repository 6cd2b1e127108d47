"""Rows of the record of an evaluation, and the samples that are made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import DataError
from rlite.evaluation.episodes import run_episodes
from rlite.evaluation.metrics import Sample
from rlite.evaluation.record import Row, row_of
from rlite.evaluation.sets import EvaluationSet
from rlite.rollout import CollectorOptions, LLMRequest, RolloutWorkflow, ScriptedEngine, trajectory
from rlite.rollout.collector.ended import Ended
from rlite.services.record.recorder import TokenTexts


class Ask(RolloutWorkflow):
    """One answer, with the further keys of the row."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        response = await engine.agenerate(LLMRequest(input_ids=[1, 2]))
        return trajectory(response, reward=1.0).update(data)


def rows_of(*items: dict[str, Any]) -> list[Row]:
    texts = TokenTexts(byte_tokenizer())
    found: list[Row] = []

    def keep(episode: Ended) -> None:
        found.append(row_of(episode, str(episode.group), texts, has_tokens=False))

    options = CollectorOptions(request_retries=0, max_concurrent_rollouts=1)
    asked = EvaluationSet("", items, Ask())
    run_episodes(ScriptedEngine([[7, 8]]), asked, [(item, 0) for item in range(len(items))], options, keep)
    return found


def test_a_trajectory_that_the_record_cannot_read_keeps_its_score() -> None:
    odd = {"num_turns": torch.tensor([1e12]), "truncated": torch.tensor([True])}
    whole, unread, scored = rows_of({}, odd, odd | {"scores": torch.tensor([0.5])})
    assert whole["turns"] == 1
    assert (unread["turns"], unread["status"]) == (None, "evaluated")
    assert Sample.of_row(whole) == Sample("0", 0, 1.0, length=2)
    assert Sample.of_row(unread) == Sample("1", 0, 1.0, truncated=True, length=2)
    assert Sample.of_row(scored).score == 0.5


def test_a_trajectory_without_a_score_is_refused() -> None:
    with pytest.raises(DataError, match=r"rewards has shape \[1, 4\]; expected \[1\]"):
        rows_of({"rewards": torch.ones(1, 4)})
