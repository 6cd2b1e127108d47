"""The programs of `examples/contracts/` run as printed, but for a tiny model, one step and short answers."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite.nn.pretrained import load_tokenizer
from rlite.runtime.sandbox.pool import close_shared_pool
from tests.games import PEERS
from tests.tiny import build_model_dir
from tests.unit.rollout.contracts.tool_template import TEMPLATE, TOKENIZER

FOLDER = Path(__file__).parents[2] / "examples" / "contracts"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
NEEDS = {"messages_agent": "anthropic", "textarena_game": "textarena"}
"""packages of programs"""
OF_DOORS = {"openenv_echo": "openenv", "ors_quiz": "openreward", "verifiers_words": "verifiers"}
"""programs whose packages are those of `make test-doors`, which runs them: tests/doors"""
SMALL = {
    "train_data.prompts_per_rollout": 2,
    "train_data.responses_per_prompt": 2,
    "rollout.train_sampling_params.max_new_tokens": 8,
    "rollout.dynamic_filtering": False,
    "rollout.max_model_len": 2048,
}


@pytest.fixture(autouse=True, scope="module")
def no_process_is_left() -> Iterator[None]:
    yield
    rlite.shutdown()
    close_shared_pool()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = build_model_dir(tmp_path_factory.mktemp("models") / "tiny", "qwen3", hidden=64)
    TOKENIZER.save_pretrained(folder)
    assert load_tokenizer(folder).chat_template == TEMPLATE
    return str(folder)


def shortened(program: str, model: str, save_dir: Path) -> str:
    """Return the text of a program that trains a small model for one step."""
    small = f'model="{model}", num_devices=1, total_steps=1, save_dir="{save_dir}", **{SMALL}'
    text = (FOLDER / f"{program}.py").read_text()
    assert text.count('model="Qwen/Qwen3-0.6B"') == 1
    text = text.replace("    import gem\n", f"    import sys\n\n    sys.path.append({str(PEERS)!r})\n    import gem\n")
    return text.replace('model="Qwen/Qwen3-0.6B"', small)


def train(program: str, model: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a shortened program in this process, and return the metrics of its step."""
    (folder / f"{program}.py").write_text(shortened(program, model, folder / "run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *arguments])
        runpy.run_path(str(folder / f"{program}.py"), run_name="__main__")
    (line,) = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)


@pytest.mark.parametrize("program", [each for each in PROGRAMS if each not in OF_DOORS])
def test_a_program_trains(program: str, model: str, tmp_path: Path) -> None:
    if program == "gem_game" and not (PEERS / "gem").is_dir():
        pytest.skip(f"gem is not in {PEERS}: `make test` installs it")
    if program in NEEDS and importlib.util.find_spec(NEEDS[program]) is None:
        pytest.skip(f"{NEEDS[program]} is not installed")
    metrics = train(program, model, tmp_path)
    assert metrics["response_length"] > 0
    assert metrics["rollout/num_lost"] == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_at_most_thirty_lines(program: str) -> None:
    assert len((FOLDER / f"{program}.py").read_text().splitlines()) <= 30
