"""The environments of `examples/environments/`: their judgement, and a training step of a tiny model in each."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rlite
from rlite.assembly.commands.env_check import check
from rlite.assembly.commands.env_options import EnvConfig
from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.imports import import_own_code
from rlite.rollout import GenerationHyperparameters, LLMRequest, ScriptedEngine
from rlite.rollout.environments.file import EnvironmentFile
from rlite.rollout.registry import WORKFLOWS
from rlite.runtime.sandbox.pool import close_shared_pool
from rlite.trainer import ppo
from tests.tiny import build_model_dir

FOLDER = Path(__file__).parents[2] / "examples" / "environments"
PASSAGES = [
    {"title": "Oslo", "text": "Oslo is the capital of Norway."},
    {"title": "Bergen", "text": "Bergen has been a harbour of Norway for long."},
    {"title": "Lima", "text": "Lima is the capital of Peru."},
]
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}<tool_call>\n{}\n</tool_call>{% endfor %}"
CALLS = (
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}"
)


@pytest.fixture(autouse=True, scope="module")
def no_process_is_left() -> Iterator[None]:
    yield
    rlite.shutdown()
    close_shared_pool()


def module(name: str) -> ModuleType:
    return EnvironmentFile(FOLDER / f"{name}.py").load()


def trained(tmp_path: Path, rows: list[dict[str, Any]], *settings: str, template: str = CHATML) -> dict[str, float]:
    """The metrics of one step of a tiny model."""
    model = build_model_dir(tmp_path / "model", "qwen3", hidden=64)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ppo.main(
        [
            *(f"actor.model_name={model}", f"train_data.path={tmp_path}/rows.jsonl", "num_devices=1"),
            *(f"train_data.prompts_per_rollout={len(rows)}", "train_data.responses_per_prompt=2"),
            *("rollout.train_sampling_params.max_new_tokens=6", "rollout.dynamic_filtering=false"),
            *("trainer.total_steps=1", f"trainer.save_dir={tmp_path}/run", *settings),
        ]
    )
    rlite.shutdown()
    (metrics,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    return metrics


def step(answer: str) -> tuple[float, float]:
    info = {"numbers": [3, 5, 9], "target": 12}
    response = asyncio.run(module("countdown").step("", answer, info))
    assert response["done"]
    return response["reward"], response["score"]


@pytest.mark.parametrize("right", ["9*5-3-5*3*2/1", "(9-5)*3", " 9 + 5 - 3 + 1 ", "(5 - 9/3) * 6", "(9 - 5) * 3\n"])
def test_countdown_accepts_expressions_of_all_numbers_alone(right: str) -> None:
    uses_all = sorted(map(int, re.findall(r"\d+", right))) == [3, 5, 9]
    assert step(f"think <answer>0</answer> <answer>{right}</answer>") == ((1.0, 1.0) if uses_all else (0.1, 0.0))


@pytest.mark.parametrize(
    "wrong", ["3+5+9", "12", "(9-5)**3", "9-5)*3", "", "3/(5-5)*9", "True+3+5+9", "(" * 9999, "f(3)"]
)
def test_countdown_gives_a_tenth_for_the_form_alone(wrong: str) -> None:
    assert step(f"<answer>{wrong}</answer>") == (0.1, 0.0)
    assert step(wrong) == (0.0, 0.0)


def test_countdown_trains(tmp_path: Path) -> None:
    rows = [{"prompt": "3 5 9 = 12", "extra_info": {"numbers": [3, 5, 9], "target": 12}}] * 2
    assert trained(tmp_path, rows, f"rollout.env_path={FOLDER}/countdown.py")["reward"] >= 0


def test_mathematics_gives_a_second_attempt_for_half() -> None:
    pytest.importorskip("math_verify")
    for answers, rewards in (
        (["\\boxed{0.5}"], [1.0]),
        (["2", "\\boxed{\\frac{1}{2}}"], [0.0, 0.5]),
        (["2", "3"], [0, 0]),
    ):
        environment = module("mathematics").make("What is half of 1?", "1/2")
        assert "half of 1" in environment.reset(seed=0)[0]
        steps = [environment.step(answer) for answer in answers]
        assert [reward for _, reward, *_ in steps] == rewards
        assert [is_over for _, _, is_over, *_ in steps] == [False, True][-len(answers) :]


def test_mathematics_trains(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    rows = [{"seed": seed, "env_options": {"problem": f"{seed}+{seed}?", "answer": str(2 * seed)}} for seed in range(2)]
    metrics = trained(tmp_path, rows, f"rollout.env_path={FOLDER}/mathematics.py", "rollout.max_turns=2")
    assert metrics["turns"] == 2.0


@pytest.fixture
def searching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search environment is known, with three passages."""
    path = tmp_path / "passages.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in PASSAGES))
    monkeypatch.setenv("SEARCH_CORPUS", str(path))
    import_own_code(str(FOLDER / "search.py"))


def test_search_reads_passages_and_is_rewarded_for_the_answer(searching: None) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLS + CHATML.replace("<|im_end|>", CALLS + "<|im_end|>", 1)
    answers = [
        '<tool_call>{"name": "search", "arguments": {"query": "Norway\'s capital"}}</tool_call>',
        "<answer>the Oslo.</answer>",
    ]
    seen: list[str] = []

    def answer(request: LLMRequest) -> list[int]:
        seen.append(tokenizer.decode(request.input_ids))
        return [*tokenizer(answers[len(seen) - 1], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    workflow = WORKFLOWS["search"](GenerationHyperparameters(max_new_tokens=128), tokenizer)
    item = {"messages": [{"role": "user", "content": "What is Norway's capital?"}], "answer": ["Oslo", "Christiania"]}
    row = asyncio.run(workflow.arun_episode(ScriptedEngine(answer), item))
    assert (row["rewards"].item(), row["num_tool_calls"].item(), row["num_tool_errors"].item()) == (1.0, 1, 0)
    assert seen[1].index("Oslo is the capital") < seen[1].index("Bergen has"), "the best passage comes first"
    assert "Christiania" not in seen[0]


def test_search_trains_from_the_command_line(searching: None, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "Norway's capital?"}], "answer": "Oslo"}] * 2
    settings = ["--import", str(FOLDER / "search.py"), "rollout.workflow=search"]
    template = TOOLS + CHATML.replace("<|im_end|>", CALLS + "<|im_end|>", 1)
    assert trained(tmp_path, rows, *settings, template=template)["reward"] == 0.0


@pytest.mark.parametrize("spec", ["self_play.py:bids", "shop.py:shop"])
def test_the_examples_of_seats_and_of_tools_with_state_pass_the_check(spec: str) -> None:
    options = EnvConfig(action="check", spec=f"{FOLDER}/{spec}", answers=["7", "tea"])
    found = {finding.topic: finding for finding in check(options)}
    assert {finding.level for finding in found.values()} <= {"ok", "note"}, found
