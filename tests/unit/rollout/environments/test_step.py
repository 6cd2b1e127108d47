from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.packs import first_rows, trajectory_index
from rlite.errors import ConfigError, DataError
from rlite.rollout import (
    CollectorOptions,
    Environment,
    EnvironmentRaised,
    EnvironmentTimeout,
    EnvironmentWorkflow,
    GenerationHyperparameters,
    LLMRequest,
    RolloutCollector,
    ScriptedEngine,
)
from rlite.rollout.environments.factory import environment_workflow
from rlite.rollout.environments.file import is_gym_file
from rlite.rollout.joined import join_batches, pad_trajectories
from rlite.runtime.sandbox.pool import close_shared_pool
from tests.tiny import tokenizer_with_bos

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id

GROWING = """
async def step(state, action, extra_info):
    turn = extra_info.get("turn", 0)
    return {"next_state": state + action + "<|im_end|>\\nmore:", "reward": float(turn + 1), "score": 0.5,
            "done": turn == extra_info["last"], "extra_info": {**extra_info, "turn": turn + 1}}
"""
FORGETFUL = """
from dataclasses import dataclass

@dataclass
class Memory:
    seen: list

async def reset(extra_info):
    extra_info["memory"] = Memory([])
    return "start:"

async def step(state, action, extra_info):
    memory = extra_info["memory"]
    assert isinstance(memory, Memory)
    memory.seen.append(state)
    done = len(memory.seen) == 2
    return {"next_state": None if done else "anew:", "reward": 1.0 if done else 0.25, "score": float(done),
            "done": done, "extra_info": extra_info}
"""

EATING_STEP = """
async def step(state, action, extra_info):
    while extra_info.get("hunger"):
        extra_info["hunger"].append(bytearray(b"x" * (4 << 20)))
    return {"next_state": None, "reward": 1.0, "score": 1.0, "done": True, "extra_info": extra_info}
"""
EATING_GAME = """
class Game:
    def __init__(self, hunger=None):
        self.hunger = hunger

    def reset(self, seed):
        return "go", {}

    def step(self, action):
        while self.hunger:
            self.hunger.append(bytearray(b"x" * (4 << 20)))
        return "", 1.0, True, False, {}

def make(**options):
    return Game(**options)
"""
HUNGRY = {"hunger": [1]}


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left() -> Iterator[None]:
    yield
    close_shared_pool()


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


HALF = ids("é")[0]


def run(tmp_path: Path, code: str, answers: list[list[int]], item: dict[str, Any], **options: Any) -> Any:
    path = tmp_path / "env.py"
    path.write_text(code)
    gconfig = GenerationHyperparameters(max_new_tokens=options.pop("max_new_tokens", 8))
    environment = Environment(path, timeout=options.pop("timeout", 60.0), num_processes=1)
    workflow = EnvironmentWorkflow(environment, gconfig, options.pop("tokenizer", TOKENIZER), **options)
    return asyncio.run(workflow.arun_episode(ScriptedEngine(answers), item))


def test_a_state_that_grows_continues_the_tokens_that_were_generated(tmp_path: Path) -> None:
    # half a character is no UTF-8: tokenised again, its text would be other tokens
    answers = [[*ids("ab"), HALF, END], [*ids("c"), END]]
    item = {"prompt": "q:", "extra_info": {"last": 1}}
    row = run(tmp_path, GROWING, answers, item, max_turns=5)
    expected = ids("q:") + answers[0] + ids("\nmore:") + answers[1]
    assert row["input_ids"].tolist() == [expected], "and the end token that the model has written is not repeated"
    loss_mask = [0] * 2 + [1] * 4 + [0] * 6 + [1] * 2
    assert row["loss_mask"].int().tolist() == [loss_mask]
    assert row["logprobs"].tolist() == [[-1.0 * made for made in loss_mask]]
    assert row["versions"].tolist() == [[made - 1 for made in loss_mask]]
    assert row["token_rewards"].nonzero().tolist() == [[0, 5], [0, 13]]
    assert row["token_rewards"][0, [5, 13]].tolist() == [1.0, 2.0]
    assert (row["rewards"].item(), row["scores"].item(), row["num_turns"].item()) == (3.0, 1.0, 2)
    assert row["turn_limited"].item() == 0
    last = run(tmp_path, GROWING, answers, item, max_turns=2)
    assert (last["num_turns"].item(), last["turn_limited"].item()) == (2, 0), "the environment has ended it, too"


def test_the_model_reads_all_that_was_said_before_and_max_turns_ends_it(tmp_path: Path) -> None:
    requests: list[LLMRequest] = []

    def answer(request: LLMRequest) -> list[int]:
        requests.append(request)
        return ids("x")

    path = tmp_path / "env.py"
    path.write_text(GROWING)
    workflow = EnvironmentWorkflow(Environment(path), GenerationHyperparameters(), TOKENIZER, max_turns=2)
    messages = [{"role": "user", "content": "hi"}]
    row = asyncio.run(workflow.arun_episode(ScriptedEngine(answer), {"messages": messages, "extra_info": {"last": 99}}))
    prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    # this time the model has written no end token, so the environment's stays
    assert [request.input_ids for request in requests] == [prompt, prompt + ids("x<|im_end|>\nmore:")]
    assert len({request.rid for request in requests}) == 1
    assert (row["num_turns"].item(), row["turn_limited"].item()) == (2, 1)


def test_a_state_that_does_not_grow_begins_a_sequence_of_the_same_trajectory(tmp_path: Path) -> None:
    answers = [ids("abc"), ids("d")]
    rows = run(tmp_path, FORGETFUL, answers, {"prompt": "unused", "extra_info": {}}, max_turns=4)
    assert rows.batch_size == (2,)
    real = rows["attention_mask"]
    assert rows["input_ids"][0][real[0]].tolist() == ids("start:abc")
    assert rows["input_ids"][1][real[1]].tolist() == ids("anew:d")
    assert rows["sequence_index"].tolist() == [0, 1]
    assert rows["rewards"].tolist() == [1.25, 1.25]
    assert rows["token_rewards"].sum(1).tolist() == [0.25, 1.0]
    batch = join_batches([pad_trajectories([rows, rows], [7, 7]), pad_trajectories([rows], [9])])
    assert trajectory_index(batch).tolist() == [0, 0, 1, 1, 2, 2]
    assert first_rows(batch).tolist() == [0, 2, 4]
    assert batch["group_ids"].tolist() == [7, 7, 7, 7, 9, 9]


def test_every_sequence_begins_once_with_what_the_tokenizer_begins_texts_with(tmp_path: Path) -> None:
    tokenizer = tokenizer_with_bos()
    bos = [tokenizer.bos_token_id]
    item = {"prompt": "q:", "extra_info": {"last": 1}}
    row = run(tmp_path, GROWING, [ids("a"), ids("b")], item, max_turns=2, tokenizer=tokenizer)
    assert row["input_ids"].tolist() == [bos + ids("q:a<|im_end|>\nmore:b")], "a turn that is appended has none"
    rows = run(tmp_path, FORGETFUL, [ids("a"), ids("b")], item, max_turns=2, tokenizer=tokenizer)
    texts = [row[mask].tolist() for row, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)]
    assert texts == [bos + ids("start:a"), bos + ids("anew:b")]


def test_a_sequence_stays_within_its_length(tmp_path: Path) -> None:
    item = {"prompt": "q:", "extra_info": {"last": 99}}
    row = run(tmp_path, GROWING, [ids("abcdefgh")], item, max_turns=9, max_length=12)
    # 2 of the prompt and 8 of the first turn; the environment's answer leaves no room for a second
    assert row["input_ids"].tolist() == [ids("q:abcdefgh")]
    assert row["truncated"].tolist() == [True]
    row = run(tmp_path, GROWING, [ids("abcdefgh")], item, max_turns=9, max_length=7)
    assert row["input_ids"].tolist() == [ids("q:abcde")]
    with pytest.raises(DataError, match="2 tokens: no room for an answer in 2"):
        run(tmp_path, GROWING, [ids("a")], item, max_length=2)


def test_a_rows_columns_beside_its_prompt_reach_the_environment_and_extra_info_wins(tmp_path: Path) -> None:
    code = """
async def step(state, action, extra_info):
    assert not {"prompt", "messages", "input_ids", "extra_info"} & extra_info.keys(), extra_info
    right = extra_info.get("answer") == action and extra_info.get("level") == 2
    return {"next_state": None, "reward": float(right), "score": 0.0, "done": True, "extra_info": extra_info}
"""
    for row in (
        {"answer": "a", "level": 2},
        {"answer": "a", "extra_info": {"level": 2}},
        {"answer": "b", "level": 3, "extra_info": {"answer": "a", "level": 2}},
        {"answer": "a", "level": 2, "extra_info": None},
    ):
        assert run(tmp_path, code, [ids("a")], {"prompt": "q", **row})["rewards"].tolist() == [1.0]


def test_an_environment_that_hangs_is_killed(tmp_path: Path) -> None:
    code = "import time\nasync def step(state, action, extra_info):\n    time.sleep(3600)\n"
    with pytest.raises(EnvironmentTimeout, match=r"env\.py ran for more than 0\.5 s"):
        run(tmp_path, code, [ids("a")], {"prompt": "q"}, timeout=0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on memory is a Linux kernel's")
@pytest.mark.parametrize("code", [EATING_STEP, EATING_GAME])
def test_an_environment_that_eats_memory_costs_its_episode_with_that_reason(tmp_path: Path, code: str) -> None:
    (tmp_path / "env.py").write_text(code)
    workflow = environment_workflow(tmp_path / "env.py", num_processes=1, memory_limit_gib=0.125)
    collector = RolloutCollector(ScriptedEngine([ids("a")]), CollectorOptions(request_retries=1))
    items = [{"prompt": "q", "seed": 0, **what} for what in ({}, {"extra_info": HUNGRY, "env_options": HUNGRY}, {})]
    batch = collector.rollout_batch(items, workflow(GenerationHyperparameters(), TOKENIZER, 1, None))
    collector.close()
    assert batch["group_ids"].tolist() == [0, 2]
    assert collector.failed_attempts == {"memory": 2}
    (reason,) = collector.lost
    assert reason.startswith("EnvironmentMemory: the environment")
    assert "of at most 0.125 GiB" in reason


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("{}", "returned no next_state, reward, score, done, extra_info"),
        ("{**good, 'reward': float('nan')}", "reward=nan; expected a finite number"),
        ("{**good, 'next_state': 3}", "next_state=3; expected a text or None"),
    ],
)
def test_result_of_a_step_is_checked(tmp_path: Path, answer: str, expected: str) -> None:
    code = f"""
async def step(state, action, extra_info):
    good = dict(next_state=None, reward=0, score=0, done=True, extra_info=extra_info)
    return {answer}
"""
    with pytest.raises(EnvironmentRaised, match=expected) as raised:
        run(tmp_path, code, [ids("a")], {"prompt": "q"})
    assert raised.value.__notes__ == ["turn 1, action: 'a'"]


def test_a_first_state_is_a_text(tmp_path: Path) -> None:
    for first in ("''", "3"):
        code = f"async def reset(extra_info):\n    return {first}\nasync def step(state, action, extra_info): ..."
        with pytest.raises(EnvironmentRaised, match=f"returned {first}; expected a text, not empty"):
            run(tmp_path, code, [ids("a")], {"prompt": "q"})


def test_a_file_that_is_no_environment_is_refused_before_any_rollout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Environment(tmp_path / "missing.py")
    with pytest.raises(ConfigError, match=r"^rollout.env_path='missing.py': no such file$"):
        is_gym_file("missing.py")
    (tmp_path / "env.py").write_text("def step(state, action, extra_info): ...")
    with pytest.raises(EnvironmentRaised, match="expected `async def step"):
        Environment(tmp_path / "env.py").check()
