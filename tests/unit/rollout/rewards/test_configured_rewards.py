"""Rewards that a config names: found, summed with their weights, and told of when they fail."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError, ImportFailed
from rlite.rollout import (
    CollectorOptions,
    RewardFunction,
    RolloutCollector,
    RolloutError,
    ScriptedEngine,
    SingleTurnWorkflow,
)
from rlite.rollout.failures import RewardInvalid, RewardRaised
from rlite.rollout.registry import REWARDS
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.rollout.rewards.options import RewardOptions, name_of

CALL = {"prompt": "2+2=", "completions": "four", "prompt_ids": [1], "completion_ids": [2]}
OWN = """
SCALE = {"one": 1.0}

def length(prompt, completions, **row):
    return float(len(completions))

def even(completions, **columns):
    return [SCALE["one"] if len(text) % 2 == 0 else None for text in completions]

def scaled(prompt, completions, **row):
    return SCALE[row["scale"]] / len(row["divisor"])

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def make(given: dict[str, Any] | None = None, **rewards: dict[str, Any]) -> Any:
    options = {name: RewardOptions(**{"in_process": True, **own}) for name, own in rewards.items()}
    return ChosenRewards(options, given or {}).make()


def test_a_single_reward_is_its_function_and_several_are_a_weighted_sum_with_parts() -> None:
    single = make(length={"path": "own.py:length"})
    assert isinstance(single, RewardFunction)
    assert asyncio.run(single(**CALL)) == 4.0
    assert asyncio.run(make(length={"path": "own.py:length", "weight": 0.5})(**CALL)) == 2.0
    several = make(long={"path": "own.py:length", "weight": -0.5}, even={"path": "own.py:even", "weight": 10.0})
    reward = asyncio.run(several(**CALL))
    assert (reward, reward.parts) == (8.0, {"long": 4.0, "even": 1.0})


def test_a_part_of_trl_that_is_none_does_not_count() -> None:
    odd = {**CALL, "completions": "odd"}
    parts = {"long": {"path": "own.py:length"}, "even": {"path": "own.py:even", "weight": 10.0}}
    reward = asyncio.run(make(**parts)(**odd))
    assert reward == 3.0
    assert math.isnan(reward.parts["even"])
    with pytest.raises(RewardInvalid, match="all are None"):
        asyncio.run(make(even=parts["even"], again=parts["even"])(**odd))


def test_parts_run_at_the_same_time_and_one_that_fails_ends_the_others() -> None:
    ended = []

    async def slow(prompt: str, completions: str, **row: Any) -> float:
        try:
            await asyncio.sleep(row["seconds"])
            return 1.0
        finally:
            ended.append(time.monotonic())

    async def fails(prompt: str, completions: str, **row: Any) -> float:
        return 1.0 / row["divisor"]

    paths = {name: {"path": f"own:{name}"} for name in ("slow", "slower", "fails")}
    reward = make({"slow": slow, "slower": slow, "fails": fails}, **paths)
    began = time.monotonic()
    assert asyncio.run(reward(**CALL, seconds=2, divisor=1)) == 3.0
    assert time.monotonic() - began < 4
    with pytest.raises(RewardRaised, match="reward fails raised ZeroDivisionError"):
        asyncio.run(reward(**CALL, seconds=3600, divisor=0))
    assert len(ended) == 4


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        ("own.py:lenght", ConfigError, r"own\.py has no 'lenght'; did you mean 'length'\?"),
        ("own.py:number", ConfigError, "expected a function, found int"),
        ("own.py", ConfigError, r"expected the function's name behind it, own\.py:FUNCTION"),
        ("nowhere.py:f", ImportFailed, "no such file in "),
        ("no.where:f", ImportFailed, "no module 'no'"),
        ("broken.py:f", ImportFailed, r"it raised ZeroDivisionError while it was imported\nTraceback.*\n.*broken\.py"),
        ("nothing", ConfigError, "expected file.py:function or package.module:function; unknown reward 'nothing'"),
    ],
)
def test_a_function_that_is_not_there_is_refused(folder: Path, path: str, error: type[Exception], said: str) -> None:
    (folder / "broken.py").write_text("1 / 0")
    with pytest.raises(error, match=rf"^reward\.path={path}: {said}") as refused:
        make(f={"path": path})
    assert "rlite/" not in str(refused.value).replace(str(folder), "")


def test_a_registered_reward_and_a_reward_function_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REWARDS, "mine", RewardFunction(lambda **arguments: 7.0, in_process=True))
    own = RewardOptions(path="mine")
    assert asyncio.run(ChosenRewards({"mine": own}, {}).make()(**CALL)) == 7.0
    with pytest.raises(ConfigError, match=r"reward\.path=mine is a RewardFunction, which has its own timeout; leave"):
        ChosenRewards({"mine": own.replace(timeout=3.0)}, {})


@pytest.mark.parametrize(
    ("path", "name"),
    [("a/my.py:f", "f"), ("pkg.mod:Class.method", "method"), ("exact", "exact"), ("m:<lambda>", "lambda")],
)
def test_a_single_reward_is_named_after_its_function(path: str, name: str) -> None:
    assert name_of(path) == name


def test_a_failure_shows_row_completion_and_the_users_own_traceback_once_for_each_kind(folder: Path) -> None:
    reward = make(scaled={"path": "own.py:scaled", "in_process": False})
    rows = [{"scale": "one", "divisor": [1]}] * 3 + [{"scale": s, "divisor": []} for s in ("one", "two", "one", "two")]
    engine = ScriptedEngine([byte_tokenizer().encode("four")])
    options = CollectorOptions(request_retries=0, max_consecutive_failures=20)
    with closing(RolloutCollector(engine, options)) as collector:
        workflow = SingleTurnWorkflow(reward, {"max_new_tokens": 8}, byte_tokenizer())
        batch = collector.rollout_batch([{"prompt": "a", **row} for row in rows], workflow)
        assert len(batch) == 3
        first = collector.first_losses
    assert list(first) == [f"RewardRaised: reward scaled raised {name}" for name in ("ZeroDivisionError", "KeyError")]
    told = first["RewardRaised: reward scaled raised KeyError"]
    assert told.splitlines() == [
        "RewardRaised: reward scaled raised KeyError: 'two'",
        "Traceback (most recent call last):",
        f'  File "{folder}/own.py", line 11, in scaled',
        '    return SCALE[row["scale"]] / len(row["divisor"])',
        "           ~~~~~^^^^^^^^^^^^^^",
        "KeyError: 'two'",
        "completion: 'four'",
        "row: prompt: 'a', scale: 'two', divisor: []",
    ]


def test_a_reward_that_always_fails_ends_the_run_at_the_limit_and_says_why() -> None:
    reward = make(scaled={"path": "own.py:scaled"})
    with closing(
        RolloutCollector(ScriptedEngine([[7]]), CollectorOptions(request_retries=0, max_consecutive_failures=3))
    ) as collector:
        workflow = SingleTurnWorkflow(reward, {"max_new_tokens": 8}, byte_tokenizer())
        with pytest.raises(RolloutError, match=r"3 groups in a row failed, the last with .*\n(.*\n)*row: prompt: 'a'"):
            collector.rollout_batch([{"prompt": "a", "scale": "two", "divisor": [1]}] * 8, workflow)
