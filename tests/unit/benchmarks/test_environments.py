"""The benchmark of environments of others: its command lines, and how it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks import environments
from benchmarks.environments import (
    Data,
    Task,
    common_texts,
    heeded,
    held_out_rise,
    ppo_settings,
    prepare,
    report,
    sft_settings,
    tasks,
    training_rise,
)
from rlite import config
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.supervised_options import SftConfig


@pytest.mark.parametrize("name", tasks())
def test_the_trainers_take_the_settings(name: str, tmp_path: Path) -> None:
    task = tasks()[name]
    imitation = config.load(SftConfig, sft_settings(task, tmp_path))
    learning = config.load(PpoConfig, ppo_settings(task, tmp_path))
    assert learning.actor.model_name == f"{imitation.trainer.save_dir}/latest"
    assert Path(learning.rollout.env_path or "").is_file()


def test_tokens_are_bytes_the_texts_between_numbers_and_words(tmp_path: Path) -> None:
    texts = [f"You have {turns} turns. Guess a number up to {turns * 7}" for turns in range(3)]
    rows = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "no"}]} for text in texts]
    assert common_texts(rows, least=3) == [" turns. Guess a number up to ", "You have "]
    assert common_texts(rows, least=4) == []
    data = Data(demonstrations=rows * 100, train=[{"seed": 1}], test=[{"seed": 2}], words=["14"])
    task = Task(title="", data=lambda: data, env_path="", settings=[], sft_epochs=1)
    prepare(task, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "blank")
    tokens = tokenizer(texts[2], add_special_tokens=False).input_ids
    assert [tokenizer.decode([token]) for token in tokens] == [
        "You have ",
        "2",
        " turns. Guess a number up to ",
        "14",
    ]
    assert json.loads((tmp_path / "test.jsonl").read_text()) == {"seed": 2}


def test_a_held_out_rise_is_of_the_items_however_often_they_are_looked_at() -> None:
    metrics = [{"step": step, "accuracy": 0.25 if step < 20 else 0.75} for step in range(41)]
    found = held_out_rise(metrics, lowest_reward=0.0)
    assert (found.before, found.after) == (0.25, 0.75)
    assert found.error == pytest.approx((2 * 0.25 * 0.75 / environments.NUM_TRIED) ** 0.5)
    assert found.is_reached
    assert held_out_rise(metrics, lowest_reward=-0.1).error > found.error, "a wider range of rewards may vary more"
    assert not held_out_rise([{**row, "accuracy": 0.5} for row in metrics], lowest_reward=0.0).is_reached


def test_a_training_rise_counts_each_prompt_once() -> None:
    metrics = [{"step": 0, "accuracy": 0.1}, *({"step": step, "reward": step / 40} for step in range(1, 41))]
    found = training_rise(metrics, lowest_reward=0.0)
    before, after = (1 + 2 + 3 + 4) / 160, (37 + 38 + 39 + 40) / 160
    assert (found.before, found.after) == pytest.approx((before, after)), "a tenth is four steps of forty"
    variance = before * (1 - before) + after * (1 - after)
    assert found.error == pytest.approx((variance / (4 * environments.PROMPTS_PER_STEP)) ** 0.5)
    assert found.is_reached
    assert not training_rise([{**row, "reward": 0.5} for row in metrics], lowest_reward=0.0).is_reached


@pytest.mark.parametrize(("greedy", "sampled", "is_reached"), [(0.9, 0.9, True), (0.9, 0.2, False), (0.2, 0.9, False)])
def test_both_rewards_are_to_rise(greedy: float, sampled: float, is_reached: bool, tmp_path: Path) -> None:
    folder = tmp_path / "spell" / "ppo"
    (folder / "latest").mkdir(parents=True)
    rows = [{"step": 0, "accuracy": 0.1}]
    rows += [
        {"step": step, "accuracy": greedy if step > 20 else 0.1, "reward": sampled if step > 20 else 0.1}
        for step in range(1, 81)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "page"
    out.mkdir()
    assert report(tmp_path, out) == is_reached
    page = (out / "README.md").read_text()
    assert f"0.100 → {greedy:.3f}" in page
    assert f"0.100 → {sampled:.3f}" in page
    assert (out / "spell.png").exists()


def test_a_guess_heeds_the_hints_when_they_leave_it_open() -> None:
    hints = ("the target number is higher than 4", "the target number is lower than 8")
    game = f"\\boxed{{4}} {hints[0]} \\boxed{{8}} {hints[1]} \\boxed{{8}} \\boxed{{6}}"
    assert heeded([{"response": game}]) == pytest.approx(2 / 3), "8 is open at first, then not; 6 is"
    assert heeded([{"response": "\\boxed{4}"}]) == 0


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "make_game", None)
    with pytest.raises(SystemExit, match="pip install gem-llm"):
        environments.games()
