"""First use with a reward function of your own: by command, in Python, and unchanged from other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite.trainer.ppo import main as ppo

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
SHORT = """
actor: {gradient_checkpointing: false}
train_data: {path: sums.jsonl, prompts_per_rollout: 4, responses_per_prompt: 4}
rollout: {train_sampling_params: {max_new_tokens: 6}, dynamic_filtering: false}
trainer: {total_steps: 2, save_dir: run}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with data."""
    monkeypatch.chdir(tmp_path)
    write("sums.jsonl", SUMS)
    Path("short.yaml").write_text(SHORT)
    return tmp_path


README = (Path(__file__).parents[2] / "README.md").read_text()
SMALLER = {
    "total_steps=50": "total_steps=1",
    '"train_data.prompts_per_rollout": 16': '"train_data.prompts_per_rollout": 2',
    "max_new_tokens=16": "max_new_tokens=2",
}


def write(path: str, rows: list[dict[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def logged() -> dict[str, float]:
    """Metrics of the last step."""
    return json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])


def test_grpo_with_an_own_reward_by_command(model: str) -> None:
    Path("my.py").write_text(
        "def digits(prompt, completions, prompt_ids, completion_ids, answer, **row):\n"
        "    return sum(letter.isdigit() for letter in completions) / max(1, len(completions))\n"
    )
    ppo(["--config", "short.yaml", f"actor.model_name={model}", "reward.path=my.py:digits"])
    assert 0 <= logged()["reward"] <= 1
    assert Path("run/latest/model.safetensors").is_file()


def test_grpo_with_an_own_reward_in_three_lines_of_python(model: str) -> None:
    def digits(prompt, completions, prompt_ids, completion_ids, answer, **row):
        return sum(letter.isdigit() for letter in completions) / max(1, len(completions))

    options: dict[str, Any] = {"train_data.prompts_per_rollout": 4, "train_data.responses_per_prompt": 4}
    options |= {"rollout": {"train_sampling_params.max_new_tokens": 6, "dynamic_filtering": False}}
    run = rlite.train("grpo", model=model, data=SUMS, reward=digits, save_dir="run", total_steps=2, **options)
    assert run.metrics["reward"] == logged()["reward"]
    assert [row["step"] for row in run.history] == [1, 2]
    assert len(run.generate(["1+1=", "2+2="], max_new_tokens=4)) == 2


def test_two_weighted_rewards(model: str) -> None:
    Path("my.py").write_text(
        "def one(prompt, completions, **row):\n    return 1.0\n"
        "def length(prompt, completions, **row):\n    return float(len(completions))\n"
    )
    rewards = ["reward.one.path=my.py:one", "reward.length.path=my.py:length", "reward.length.weight=-0.5"]
    ppo(["--config", "short.yaml", f"actor.model_name={model}", *rewards])
    metrics = logged()
    assert metrics["reward/one"] == 1
    assert metrics["reward"] == pytest.approx(1 - 0.5 * metrics["reward/length"])


def test_a_reward_function_of_trl_unchanged(model: str) -> None:
    Path("trl_rewards.py").write_text(
        "def begins_right(completions, answer, **kwargs):\n"
        "    texts = [completion[0]['content'] for completion in completions]\n"
        "    return [1.0 if text[:1] == gold[:1] else 0.0 for text, gold in zip(texts, answer)]\n"
    )
    write("sums.jsonl", [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in SUMS])
    ppo(["--config", "short.yaml", f"actor.model_name={model}", "reward.path=trl_rewards.py:begins_right"])
    assert "rollout/num_failed_attempts" in logged()
    assert logged()["rollout/num_failed_attempts"] == 0


def test_a_compute_score_of_verl_unchanged(model: str) -> None:
    Path("score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert (data_source, extra_info['split']) == ('sums', 'train')\n"
        "    return {'score': float(solution_str.startswith(ground_truth)), 'length': len(solution_str)}\n"
    )
    verl = {"data_source": "sums", "ability": "math", "extra_info": {"split": "train", "index": 0}}
    chats = [[{"role": "user", "content": row["prompt"]}] for row in SUMS]
    truths = [{"style": "rule", "ground_truth": row["answer"]} for row in SUMS]
    write("sums.jsonl", [{**verl, "prompt": c, "reward_model": t} for c, t in zip(chats, truths, strict=True)])
    ppo(["--config", "short.yaml", f"actor.model_name={model}", "reward.path=score.py:compute_score"])
    assert logged()["rollout/num_failed_attempts"] == 0


def test_the_first_program_of_the_readme(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = README.split("```python\n")[1].split("```")[0]
    for given, smaller in {"Qwen/Qwen3-0.6B": model, **SMALLER}.items():
        assert program.count(given) == 1
        program = program.replace(given, smaller)
    exec(compile(program, "readme.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines()[-1].startswith("0.0 runs/grpo/latest ['")
