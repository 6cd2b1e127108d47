from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlite.errors import ConfigError
from rlite.rollout import CollectorOptions, EnvironmentRaised, EnvironmentTimeout, RolloutCollector, ScriptedEngine
from rlite.rollout.contracts import ToolEnvironmentWorkflow, TrlEnvironment, contract_workflow
from rlite.runtime.sandbox.pool import close_shared_pool
from tests.unit.rollout.contracts.counters import FACTORIES, Counter, Silent, num_words
from tests.unit.rollout.contracts.tool_template import TOKENIZER, called, said, text_of

FILE = Path(__file__).with_name("counters.py")
ITEM = {"prompt": [{"role": "user", "content": "Count."}], "target": 5}


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left() -> Iterator[None]:
    yield
    close_shared_pool()


def play(environment: TrlEnvironment, answers: list[list[int]], item: Any = ITEM, **options: Any) -> Any:
    workflow = ToolEnvironmentWorkflow(environment, {"max_new_tokens": 200}, TOKENIZER, **options)
    return asyncio.run(workflow.arun_episode(ScriptedEngine(answers), dict(item)))


def test_methods_are_tools_of_one_object_whose_state_the_reward_reads() -> None:
    rows = play(TrlEnvironment(Counter), [called("add", number=2), called("add", number=3), said("done")])
    assert rows["rewards"].tolist() == [1.0]
    assert rows["num_tool_calls"].tolist() == [2]
    assert "Count. Target: 5." in text_of(rows)
    assert "now 5" in text_of(rows)


def test_a_tool_that_raises_tells_the_model_and_keeps_the_state() -> None:
    answers = [called("add", number=5), called("add", number=-1), said("done")]
    rows = play(TrlEnvironment(Counter), answers)
    assert rows["rewards"].tolist() == [1.0]
    assert rows["num_tool_errors"].tolist() == [1]
    assert "Error: ValueError: only up" in text_of(rows)


def test_a_tool_that_hangs_costs_its_episode_and_its_process() -> None:
    with pytest.raises(EnvironmentTimeout):
        play(TrlEnvironment(Counter, timeout=5.0), [called("sleep")])


def test_trls_reward_functions_get_the_environments_of_the_whole_group() -> None:
    environment = TrlEnvironment(Silent, num_words)
    workflow = ToolEnvironmentWorkflow(environment, {"max_new_tokens": 200}, TOKENIZER, max_turns=2)
    with closing(RolloutCollector(ScriptedEngine([called("say", word="yes")]), CollectorOptions())) as collector:
        batch = collector.rollout_batch([{"prompt": ITEM["prompt"]}], workflow, group_size=2)
    assert batch["rewards"].tolist() == [202.0, 202.0]


def test_a_row_names_one_of_several_environments() -> None:
    environment = TrlEnvironment(FACTORIES, num_words)
    rows = play(environment, [called("say", word="a"), said("done")], {**ITEM, "environment": "silent"})
    assert rows["rewards"].tolist() == [101.0]
    with pytest.raises(EnvironmentRaised, match="expected one of counter, silent"):
        play(environment, [said("x")], {**ITEM, "environment": "other"})


def test_an_environment_without_any_reward_is_refused_before_it_plays() -> None:
    with pytest.raises(ConfigError, match="no get_reward"):
        TrlEnvironment(Silent).check()


def test_the_command_line_names_a_file_and_its_class() -> None:
    make = contract_workflow(f"trl:{FILE}:Counter")
    workflow = make({"max_new_tokens": 200}, TOKENIZER, max_turns=3, max_length=None)
    engine = ScriptedEngine([called("add", number=5), said("done")])
    assert asyncio.run(workflow.arun_episode(engine, dict(ITEM)))["rewards"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("path", "words"),
    [("trl:", "expected trl:file.py:NAME"), ("trl:Counter", "expected file.py:NAME"), ("trl:no.py:X", "no such file")],
)
def test_a_name_that_is_no_factory_is_refused_with_its_form(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        contract_workflow(path)


def test_an_unknown_argument_of_a_contract_is_refused() -> None:
    with pytest.raises(ConfigError, match="speed"):
        contract_workflow(f"trl:{FILE}:Counter", {"speed": 3})
