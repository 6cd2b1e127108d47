"""Failures do not choose the answers that an evaluation counts, in whatever way it is made."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
from tensordict import TensorDict

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.evaluation.episodes import evaluate, run_episodes
from rlite.evaluation.metrics import Sample, selection_of, summary
from rlite.evaluation.record import row_of
from rlite.evaluation.sets import EvaluationSet
from rlite.rollout import (
    CollectorOptions,
    GenerationHyperparameters,
    LLMRequest,
    RolloutCollector,
    RolloutWorkflow,
    ScriptedEngine,
    trajectory,
)
from rlite.rollout.collector.ended import Ended
from rlite.rollout.openai import AgentWorkflow
from rlite.services.record.recorder import TokenTexts
from tests.agents import WITH_TOOLS, Speaker, tokenizer_with

TOKENIZER = tokenizer_with(WITH_TOOLS)
NUM_ITEMS = 500
RIGHT, WRONG = 65, 66


class Tossing(ScriptedEngine):
    """Writes one of two tokens, by chance: by its own, or by the seed of the request."""

    def __init__(self) -> None:
        chance = random.Random(1)

        def toss(request: LLMRequest) -> list[int]:
            own = chance if request.gconfig.seed is None else random.Random(request.gconfig.seed)
            token = own.choice([RIGHT, WRONG])
            return [token] * (3 if token == RIGHT else 9)

        super().__init__(toss)


class GraderThatRaises(RolloutWorkflow):
    """Gives every right answer its score, and raises on every other one."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        gconfig = GenerationHyperparameters(seed=self.seed, max_new_tokens=20)
        response = await engine.agenerate(LLMRequest(input_ids=[1, 2], gconfig=gconfig))
        if response.output_tokens[0] == WRONG:
            raise ValueError("this answer cannot be parsed")
        return trajectory(response, reward=1.0)


def in_training(workflow: RolloutWorkflow, items: Sequence[Any], samples: int = 1) -> list[Sample]:
    """As `grpo` does, and `sft` with answered sets."""
    collector = RolloutCollector(Tossing(), CollectorOptions())
    found = evaluate(collector, EvaluationSet("", items, workflow, samples))
    collector.close()
    return list(found.samples)


def by_rlite_eval(workflow: RolloutWorkflow, items: Sequence[Any], samples: int = 1) -> list[Sample]:
    ended: list[Ended] = []
    asked, options = EvaluationSet("", items, workflow, samples), CollectorOptions(max_concurrent_rollouts=8)
    run_episodes(Tossing(), asked, [*product(range(len(items)), range(samples))], options, ended.append)
    texts = TokenTexts(byte_tokenizer())
    return [Sample.of_row(row_of(each, str(each.group), texts, has_tokens=False)) for each in ended]


MODES = [in_training, by_rlite_eval]
Mode = Callable[..., list[Sample]]


@pytest.mark.parametrize("mode", MODES)
def test_a_grader_that_raises_on_half_of_the_answers_gives_the_true_accuracy(mode: Mode) -> None:
    samples = mode(GraderThatRaises(), [{}] * NUM_ITEMS)
    metrics = summary(samples)
    assert abs(metrics["accuracy"] - 0.5) < 0.09, "four standard errors"
    num_failed = metrics["num_errors"]
    assert num_failed == NUM_ITEMS - NUM_ITEMS * metrics["accuracy"]
    assert metrics["num_failed_attempts"] == metrics["failed_attempts/ValueError"] == 4 * num_failed
    assert "num_redrawn" not in metrics
    assert (metrics["length_failed"], metrics["length_kept"]) == (9, 3)
    causes = [cause for cause, _ in selection_of(samples).alarms()]
    assert [cause for cause in causes if "attempts" in cause]
    assert [cause for cause in causes if "longer" in cause]


@pytest.mark.parametrize("mode", MODES)
def test_samples_of_an_item_differ_although_the_sampling_has_a_seed(mode: Mode) -> None:
    samples = mode(GraderThatRaises(seed=3), [{}] * 3, samples=8)
    ordered = sorted(samples, key=lambda own: (int(own.item), own.sample))
    by_item = [[each.score for each in ordered[first : first + 8]] for first in (0, 8, 16)]
    assert {None, 1.0} == set(by_item[0])
    assert by_item[0] == by_item[1] == by_item[2], "the seed decides the answer of each sample"


@pytest.mark.parametrize("mode", ["training", "evaluation", "rlite eval"])
def test_choices_and_samples_of_an_agent_with_a_seed_all_differ(mode: str) -> None:
    engine = Speaker(["a"], TOKENIZER)

    async def agent(client: Any, data: dict[str, Any]) -> float:
        asked = [{"role": "user", "content": "?"}]
        await client.chat.completions.create(model="policy", messages=asked, n=2, seed=7)
        return 1.0

    workflow = AgentWorkflow(agent, GenerationHyperparameters(), TOKENIZER, style="individual")
    collector = RolloutCollector(engine, CollectorOptions())
    if mode == "training":
        collector.rollout_batch([{}], workflow, group_size=4)
    elif mode == "evaluation":
        collector.evaluate([{}], workflow, group_size=4)
    else:
        options = CollectorOptions(max_concurrent_rollouts=2)
        run_episodes(
            engine,
            EvaluationSet("", [{}], workflow, samples=4),
            [(0, sample) for sample in range(4)],
            options,
            lambda ended: None,
        )
    collector.close()
    seeds = [request.gconfig.seed for request in engine.requests]
    assert len(seeds) == len(set(seeds)) == 8
