from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from rlite.assembly.commands.env_check import check, main
from rlite.assembly.commands.env_options import EnvConfig
from rlite.rollout import RewardFunction, SingleTurnWorkflow, ToolUseWorkflow
from rlite.trainer.options import SingleTableOptions

calls = itertools.count()


def right(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> float:
    return float(completions == "yes")


def same(completions: str, prompt: str, **row: Any) -> float:
    return 0.5


def leaking(completions: str, prompt: str, **row: Any) -> float:
    return float(next(calls))


def failing(completions: str, prompt: str, **row: Any) -> float:
    if completions == "yes":
        raise ValueError("no yes")
    return float(completions == "A")


def undocumented(word):  # type: ignore[no-untyped-def]
    return word


def single(reward: Any) -> Any:
    return lambda gconfig, tokenizer: SingleTurnWorkflow(RewardFunction(reward, in_process=True), gconfig, tokenizer)


good, flat, leaks, fails = single(right), single(same), single(leaking), single(failing)


def with_tools(gconfig: Any, tokenizer: Any) -> Any:
    return ToolUseWorkflow([undocumented], right, gconfig, tokenizer)


class Shop:
    def __init__(self, row: Any) -> None:
        self.orders: list[str] = []

    def prompt(self) -> str:
        return "buy tea"

    def order(self, what: str) -> str:
        """Orders something.

        Args:
            what: the good
        """
        self.orders.append(what)
        return f"{len(self.orders)} orders"

    def report(self) -> dict[str, Any]:
        return {"num": len(self.orders)}


def shop(gconfig: Any, tokenizer: Any) -> Any:
    reward = RewardFunction(lambda completions, prompt, num, **row: num + (completions == "yes"), in_process=True)
    return ToolUseWorkflow([Shop.order], reward, gconfig, tokenizer, state=Shop)


def findings(name: str, **options: Any) -> dict[str, tuple[str, str]]:
    found = check(EnvConfig(action="check", spec=f"{__file__}:{name}", episodes=4, rows=1, **options))
    return {finding.topic: (finding.level, finding.text) for finding in found}


def test_a_sound_workflow_passes() -> None:
    for name in ("good", "shop"):
        found = findings(name)
        assert {level for level, _ in found.values()} == {"ok"}, found
        assert found["rewards"][1].startswith("2 different ones")


@pytest.mark.parametrize(
    ("name", "topic", "text"),
    [
        ("flat", "rewards", "have the reward 0.5, whatever was answered"),
        ("leaks", "state", "the reward is another"),
        ("fails", "episodes", "2 of 5 failed: RewardRaised"),
        ("with_tools", "loading", "'undocumented' has no schema"),
        ("nothing", "loading", "has no 'nothing'"),
    ],
)
def test_what_is_wrong_is_named_before_a_model_is_trained(name: str, topic: str, text: str) -> None:
    level, told = findings(name, answers=["yes"])[topic]
    assert level == "FAILED"
    assert text in told


def test_the_command_ends_with_1_if_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    result = main(["check", f"{__file__}:leaks", "episodes=2", "rows=1"])
    assert (result.status, result.value["failed"]) == (1, ["state"])
    assert "of the checks failed: state" in capsys.readouterr().out


class Counter:
    def reset(self, target: int, **row: Any) -> str:
        self.value, self.target = 0, target
        return ""

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: what to add
        """
        self.value += number
        return str(self.value)

    def get_reward(self) -> float:
        return float(self.value == self.target)


def test_an_environment_of_a_contract_is_played_and_missing_columns_are_named(tmp_path: Path) -> None:
    spec = f"trl:{__file__}:Counter"
    (told,) = [finding.text for finding in check(EnvConfig(action="check", spec=spec)) if finding.level == "FAILED"]
    assert "missing 1 required positional argument: 'target' (the rows have only seed; give yours with" in told
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": [{"role": "user", "content": "go"}], "target": 0}\n')
    found = check(EnvConfig(action="check", spec=spec, data=SingleTableOptions(path=str(data))))
    assert "ended without a failure" in {finding.topic: finding.text for finding in found}["episodes"]


class Hanging(SingleTurnWorkflow):
    async def arun_episode(self, engine: Any, data: Any) -> Any:
        await self.reset()

    async def reset(self) -> None:
        await asyncio.sleep(60)


def hangs_in_reset(gconfig: Any, tokenizer: Any) -> Any:
    return Hanging(right, gconfig, tokenizer)


async def never(completions: str, prompt: str, **row: Any) -> float:
    await asyncio.sleep(60)
    return 0.0


hangs_in_reward = single(never)


@pytest.mark.parametrize(("spec", "step"), [("hangs_in_reset", "reset"), ("hangs_in_reward", "reward")])
def test_the_step_that_hangs_is_named_with_its_limit(spec: str, step: str) -> None:
    options = EnvConfig(action="check", spec=f"{__file__}:{spec}", rows=1, episodes=1, timeout=0.3)
    told = [str(finding) for finding in check(options) if finding.level == "FAILED"]
    assert any(f"more than 0.3 s (timeout): {step} did not end" in each for each in told), told


class Adding:
    """Counts, as an environment of TRL's contract."""

    def reset(self, **row: Any) -> str:
        self.count = 0
        return "Count."

    def add(self, number: int) -> str:
        """Adds a number.

        Args:
            number: the number.
        """
        self.count += number
        return str(self.count)

    def get_reward(self) -> float:
        return float(self.count)


def test_the_tools_of_an_environment_are_called() -> None:
    spec = f"trl:{__file__}:Adding"
    found = {finding.topic: finding for finding in check(EnvConfig(action="check", spec=spec, rows=1, episodes=2))}
    assert "reward 1, whatever" in found["rewards"].text  # each episode added the example 1 once


def talking(completions: str, prompt: str, **row: Any) -> float:
    print("judging", repr(completions))
    return float(completions == "yes")


def talks(gconfig: Any, tokenizer: Any) -> Any:
    return SingleTurnWorkflow(RewardFunction(talking), gconfig, tokenizer)


def test_what_functions_print_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", f"{__file__}:talks"])
    told = capsys.readouterr()
    assert told.err.count("judging") == 1, "quoted texts make no other kind"
    assert "judging" not in told.out


GUESSING = """
def step(state, action, extra_info):
    turns = extra_info.get("turns", 0) + 1
    done = turns == {turns}
    return {{"next_state": state + action, "reward": 0.0, "score": 0.0, "done": done, "extra_info": {{"turns": turns}}}}
"""


@pytest.mark.parametrize(
    ("turns", "level", "text"),
    [
        (1, "ok", "1 in an episode: rollout.max_turns=1, its default, is enough"),
        (3, "note", "up to 3 in an episode (this check allows max_turns=4); train with rollout.max_turns=3 or more"),
        (9, "note", "5 of 5 episodes did not end within the max_turns=4 of this check; train with rollout.max_turns=4"),
    ],
)
def test_the_turns_that_an_environment_needs_are_told_with_the_option_of_training(
    turns: int, level: str, text: str, tmp_path: Path
) -> None:
    game = tmp_path / "guess.py"
    game.write_text(GUESSING.format(turns=turns).replace("def step", "async def step"))
    options = EnvConfig(action="check", spec=str(game), rows=1, episodes=4)
    found = {finding.topic: finding for finding in check(options)}["turns"]
    assert found.level == level
    assert found.text.startswith(text)
    assert level == "ok" or found.text.endswith("(its default: 1)")
    assert "turns" not in findings("shop"), "rollout.max_turns is not for a workflow"
