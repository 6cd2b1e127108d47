from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from typing import Any

import pytest

from rlite.errors import ConfigError
from rlite.rollout import GenerationHyperparameters, RewardFunction, ScriptedEngine, Tool, ToolUseWorkflow
from rlite.rollout.failures import EnvironmentFailure
from tests.unit.rollout.tools.test_workflow import END, TOKENIZER, add, call, ids

closed: list[Any] = []
SAMPLING = GenerationHyperparameters(max_new_tokens=512)


class Shop:
    """A database of one episode, whose connection works in one thread alone."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.thread = threading.get_ident()
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table orders (what text)")
        self.row = row

    def prompt(self) -> str:
        return f"buy {self.row['what']}"

    def order(self, what: str) -> dict[str, Any]:
        """Orders something.

        Args:
            what: name of the good
        """
        if what == "nothing":
            raise ValueError("sold out")
        self.database.execute("insert into orders values (?)", [what])
        return {"orders": self.report()["orders"]}

    def report(self) -> dict[str, Any]:
        return {"orders": [what for (what,) in self.database.execute("select what from orders")]}

    def close(self) -> None:
        self.database.close()
        closed.append(self.row["what"])


def hang(state: Shop, seconds: float) -> str:
    """Waits.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "woken"


async def peek(state: Shop) -> str:
    """Looks at the row."""
    return state.row["what"]


def strange(state: Shop) -> Any:
    """Returns no JSON."""
    return object()


def bought(orders: list[str], what: str, **data: Any) -> float:
    return float(orders == [what])


def workflow(tools: Any = (Shop.order,), state: Any = Shop, **options: Any) -> ToolUseWorkflow:
    reward = RewardFunction(bought, in_process=True)
    return ToolUseWorkflow(tools, reward, SAMPLING, TOKENIZER, state=state, **options)


def run(answers: list[str], item: Any = None, **options: Any) -> Any:
    engine = ScriptedEngine([[*ids(text), END] for text in answers])
    return asyncio.run(workflow(**options).arun_episode(engine, dict(item or {"what": "tea"})))


def test_tools_share_the_state_which_the_reward_reads_and_which_is_closed() -> None:
    closed.clear()
    row = run([call("order", '{"what": "tea"}'), "done"])
    assert row["rewards"].tolist() == [1.0]
    assert '<tool_response>{"orders": ["tea"]}</tool_response>' in TOKENIZER.decode(row["input_ids"][0])
    assert closed == ["tea"]


def test_the_prompt_may_be_that_of_the_state_so_that_rows_need_none() -> None:
    row = run(["done"])
    assert "<|im_start|>user\nbuy tea<|im_end|>" in TOKENIZER.decode(row["input_ids"][0])
    assert not workflow().needs_prompt
    assert workflow(state=lambda row: None).needs_prompt


def test_no_state_leaks_into_episodes_that_run_at_the_same_time() -> None:
    async def both() -> list[Any]:
        flow = workflow()
        script = [[[*ids(call("order", f'{{"what": "{what}"}}')), END], [*ids("ok"), END]] for what in ("a", "b")]
        engines = [ScriptedEngine(answers, latency=0.05) for answers in script]
        pairs = zip(engines, ("a", "b"), strict=True)
        return await asyncio.gather(*(flow.arun_episode(engine, {"what": what}) for engine, what in pairs))

    assert [row["rewards"].item() for row in asyncio.run(both())] == [1.0, 1.0]


def test_failures_of_tools_are_results_and_the_state_is_closed() -> None:
    closed.clear()
    calls = [call("order", '{"what": "nothing"}'), call("order"), call("strange"), call("peek"), call("add", "{}")]
    row = run(["".join(calls), "ok"], tools=[Shop.order, strange, peek, add])
    text = TOKENIZER.decode(row["input_ids"][0])
    assert "<tool_response>Error: ValueError: sold out</tool_response>" in text
    assert "missing 1 required positional argument: 'what'" in text
    assert "Error: TypeError: Object of type object is not JSON serializable" in text
    assert "<tool_response>tea</tool_response>" in text
    assert row["num_tool_errors"].item() == 4
    assert closed == ["tea"]


def test_a_tool_that_hangs_costs_its_own_episode_alone() -> None:
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure, match="more than"):  # report() waits behind it
        run([call("hang", '{"seconds": 8}'), "ok"], tools=[hang], tool_timeout=0.2)
    assert time.monotonic() - began < 7


def test_the_model_does_not_see_the_parameter_of_the_state() -> None:
    for tool in (Shop.order, hang):
        parameters = Tool.of(tool).schema["function"]["parameters"]
        assert parameters["required"] == [*parameters["properties"]]
        assert len(parameters["required"]) == 1
    assert Tool.of(hang).schema["function"]["parameters"]["properties"]["seconds"]["type"] == "number"


def test_a_tool_that_needs_a_state_is_refused_without_one() -> None:
    with pytest.raises(ConfigError, match="the first parameter of order is the state"):
        workflow(state=None)


def test_a_state_that_cannot_be_made_is_a_failure_with_its_reason() -> None:
    with pytest.raises(EnvironmentFailure, match="the state Shop raised KeyError"):
        run(["ok"], item={"who": "me"})
