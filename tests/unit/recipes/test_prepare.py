"""The recipes' preparation on local files with the columns of the datasets, and the options of their launch scripts."""

from __future__ import annotations

import importlib
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

from recipes.math.prepare import last_boxed
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.config import load
from rlite.data.rows import check_prompts
from rlite.data.sft import preference_rows
from rlite.rollout.rewards import gsm8k_reward, math_verify_reward
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.supervised_options import DpoConfig, RmConfig

ROOT = Path(__file__).parents[3]
TRAINERS: dict[str, Any] = {
    "rlite.trainer.ppo": PpoConfig,
    "rlite.trainer.dpo": DpoConfig,
    "rlite.trainer.rm": RmConfig,
}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHAT = {
    "chosen": [turn("user", "2+3?"), turn("assistant", "5")],
    "rejected": [turn("user", "2+3?"), turn("assistant", "6")],
}
EQUAL = {"chosen": CHAT["chosen"], "rejected": CHAT["chosen"]}
TABLES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "countdown": {"train": [{"target": 17 + i, "nums": [3, 5, 9 + i]} for i in range(20)]},
    "gsm8k": {split: [{"question": "2+3?", "answer": "2+3=<<2+3=5>>5\n#### 5"}] for split in ("train", "test")},
    "math": {
        split: [{"problem": "Half?", "level": "Level 1", "type": "Algebra", "solution": r"So $\boxed{\frac{1}{2}}$."}]
        for split in ("train", "test")
    },
    "ultrafeedback": {
        f"{name}_prefs": [
            {"prompt": "2+3?", "score_chosen": 9.0, **CHAT},
            {"prompt": "2+3?", "score_chosen": 9.0, **EQUAL},
        ]
        for name in ("train", "test")
    },
    "skywork_rm": {"train": [{**CHAT, "source": "magpie"}] * 41},
}


@pytest.fixture(scope="module", autouse=True)
def no_hub() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the rows that each script wrote, by recipe and file."""
    found = {}
    for name, splits in TABLES.items():
        dataset, folder = tmp_path_factory.mktemp("dataset"), tmp_path_factory.mktemp("rows")
        files = {split: f"{split}.jsonl" for split in splits}
        header = [{"split": split, "path": path} for split, path in files.items()]
        (dataset / "README.md").write_text(
            f"---\nconfigs:\n- config_name: default\n  data_files: {json.dumps(header)}\n---\n"
        )
        for split, rows in splits.items():
            (dataset / files[split]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        importlib.import_module(f"recipes.{name}.prepare").main(["--dataset", str(dataset), "--folder", str(folder)])
        found[name] = {
            path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.jsonl")
        }
    return found


@pytest.mark.parametrize("name", ["countdown", "gsm8k", "math"])
def test_prompts_are_prompts(name: str, prepared: Any) -> None:
    assert {split: len(rows) for split, rows in prepared[name].items()} == (
        {"train": 18, "test": 2}
        if name == "countdown"
        else {"train": 7 if name == "math" else 1, "test": 7 if name == "math" else 1}
    )
    for split, rows in prepared[name].items():
        check_prompts(rows, split)


def test_the_answers_are_those_that_the_scorers_read(prepared: Any) -> None:
    assert prepared["countdown"]["train"][0]["extra_info"] == {"numbers": [3, 5, 9], "target": 17}
    assert gsm8k_reward("", "#### 5", [], [], **prepared["gsm8k"]["train"][0]) == 1.0
    assert math_verify_reward("", r"\boxed{0.5}", [], [], **prepared["math"]["test"][0]) == 1.0


@pytest.mark.parametrize("name", ["ultrafeedback", "skywork_rm"])
def test_pairs_are_pairs_and_equal_answers_are_left_out(name: str, prepared: Any) -> None:
    pair = {"messages": [turn("user", "2+3?")], "chosen": "5", "rejected": "6"}
    expected = {"train": 39, "test": 2} if name == "skywork_rm" else {"train": 1, "test": 1}
    assert {split: len(rows) for split, rows in prepared[name].items()} == expected
    for rows in prepared[name].values():
        assert all(row == pair for row in rows)
        assert len(preference_rows(rows, byte_tokenizer(), 64)) == len(rows)


def test_the_last_box_is_read_with_its_braces() -> None:
    assert last_boxed(r"\boxed{1} and \boxed{\frac{a}{b}}.") == r"\frac{a}{b}"
    assert last_boxed("nothing") is None
    assert last_boxed(r"\boxed{1") is None


@pytest.mark.parametrize("name", TABLES)
def test_without_the_dataset_a_script_says_what_to_do(name: str) -> None:
    with pytest.raises(SystemExit, match=r"(?s)cannot load the split.*--dataset FOLDER"):
        importlib.import_module(f"recipes.{name}.prepare").main(["--folder", "never"])


def test_another_dataset_is_refused_by_its_columns(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "no question"}\n')
    with pytest.raises(SystemExit, match="no column question, answer; it has text"):
        importlib.import_module("recipes.gsm8k.prepare").main(["--dataset", str(tmp_path), "--folder", str(tmp_path)])


@pytest.mark.parametrize("name", TABLES)
def test_the_trainer_takes_the_settings_of_the_launch_script(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script = ROOT / "recipes" / name / "run.sh"
    assert os.access(script, os.X_OK)
    command = script.read_text().partition("exec ")[2].replace("${MODEL:-", "").replace('}"', '"')
    words = shlex.split(command.replace("\\\n", " "))
    at = words.index("-m")
    settings = [word for word in words[at + 2 :] if word != "$@"]
    config = load(TRAINERS[words[at + 1]], settings)
    assert config.trainer.save_dir == f"runs/{name}"
    if isinstance(config, PpoConfig):
        rewards = ChosenRewards(config.reward, {}) if config.reward else None
        assert rewards is not None or Path(str(config.rollout.env_path)).is_file()
