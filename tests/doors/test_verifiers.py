"""With the real verifiers: `make test-doors`."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError
from rlite.rollout import EnvironmentRaised, EnvironmentTimeout, LLMRequest, ScriptedEngine
from rlite.rollout.contracts import VerifiersEnvironment, VerifiersWorkflow, contract_workflow
from rlite.runtime.sandbox.pool import close_shared_pool
from tests.doors.learning import check_learning, tiny_model
from tests.doors.programs import make_model, train

pytest.importorskip("verifiers.v1", reason="make test-doors installs it")
TASKSET = str(Path(__file__).with_name("words_taskset.py"))
NO_TASKS = """
import verifiers.v1 as vf

__all__ = ["Nothing"]


class Nothing(vf.Taskset[vf.Task[vf.TaskData]]):
    def load(self):
        return iter(())
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    made = byte_tokenizer()
    made.name_or_path = str(folder)
    yield made
    close_shared_pool()


def said(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def play(tokenizer: Any, task: int, answer: Any, timeout: float = 300.0) -> Any:
    workflow = VerifiersWorkflow(VerifiersEnvironment(TASKSET, timeout), {"max_new_tokens": 24}, tokenizer)
    return asyncio.run(workflow.arun_episode(ScriptedEngine(answer, version=7), {"task": task}))


def test_an_episode_is_a_row_of_the_engines_tokens_with_the_reward_of_the_trace(tokenizer: Any) -> None:
    rows = play(tokenizer, 1, [said(tokenizer, "eee yes")])
    assert rows["rewards"].tolist() == [0.5]
    text = tokenizer.decode(rows["input_ids"][0].tolist())
    assert text == "<|im_start|>user\nSay bee<|im_end|>\n<|im_start|>assistant\neee yes<|im_end|>"
    assert rows["loss_mask"].sum().item() == 8
    assert set(rows["versions"][rows["loss_mask"]].tolist()) == {7}
    assert set(rows["logprobs"][rows["loss_mask"]].tolist()) == {-1.0}


def test_every_branch_of_a_trace_is_a_row_and_shared_turns_are_trained_once(tokenizer: Any) -> None:
    def answer(request: LLMRequest) -> list[int]:
        return said(tokenizer, f"e{len(request.input_ids)}")

    rows = play(tokenizer, 4, answer)
    assert len(rows) == 2
    assert rows["num_turns"].tolist() == [3, 3]
    first, second = rows["loss_mask"].int().tolist()
    shared = next(place for place, (a, b) in enumerate(zip(*rows["input_ids"].tolist(), strict=True)) if a != b)
    assert sum(first[:shared]) > 0
    assert sum(second[:shared]) == 0


def test_an_error_of_a_trace_is_a_failure_with_its_reason(tokenizer: Any) -> None:
    with pytest.raises(EnvironmentRaised, match="this task cannot be scored"):
        play(tokenizer, 2, [said(tokenizer, "e")])


def test_an_episode_that_hangs_ends_with_its_deadline(tokenizer: Any) -> None:
    play(tokenizer, 0, [said(tokenizer, "e")])  # loads the environment
    began = time.monotonic()
    with pytest.raises(EnvironmentTimeout):
        play(tokenizer, 3, [said(tokenizer, "e")], timeout=20.0)
    assert time.monotonic() - began < 120


def test_the_command_line_names_a_taskset(tokenizer: Any) -> None:
    workflow = contract_workflow(f"verifiers:{TASKSET}", timeout=300.0)({"max_new_tokens": 24}, tokenizer)
    rows = asyncio.run(workflow.arun_episode(ScriptedEngine([said(tokenizer, "ee")]), {"seed": 5}))
    assert rows["rewards"].tolist() == [0.25]


def test_a_taskset_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no_tasks.py").write_text(NO_TASKS)
    with pytest.raises(ConfigError, match="has no tasks"):
        contract_workflow(f"verifiers:{tmp_path / 'no_tasks.py'}", timeout=300.0)
    close_shared_pool()


@pytest.mark.skipif(shutil.which("uv") is None, reason="the harness `null` needs uv, and uv a package index")
def test_the_example_trains(tmp_path: Path) -> None:
    train("verifiers_words", make_model(tmp_path / "model"), tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_held_out_rewards_rise(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    check_learning(tmp_path, model, [{"task": 0}], [{"task": 1}], env_path=f"verifiers:{TASKSET}", env_timeout=600.0)
