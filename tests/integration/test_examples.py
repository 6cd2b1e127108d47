"""Every example and the quickstart run as a user runs them, shortened."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked_python
from tests.tiny import build_model_dir

ROOT = Path(__file__).parents[2]


def run(*command, cwd, python=sys.executable):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python}
    done = subprocess.run([python, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("grpo.py", 2),
        ("grpo_from_engines.py", 2),
        ("agent.py", 2),
        pytest.param("gym_environment.py", 1, marks=pytest.mark.nightly),
    ],
)
def test_a_grpo_example_prints_its_reward(name, steps, tmp_path):
    out = run(str(ROOT / "examples" / name), str(steps), cwd=tmp_path, python=forked_python.python())
    assert "reward" in out


@pytest.mark.nightly
def test_an_example_runs_again_with_more_steps_and_goes_on(tmp_path):
    command, python = str(ROOT / "examples" / "grpo.py"), forked_python.python()
    run(command, "1", cwd=tmp_path, python=python)
    assert "resumed from step 1" in run(command, "2", cwd=tmp_path, python=python)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["example-grpo"]


def test_the_example_of_sft_learns_the_answer_of_its_chats(tmp_path):
    out = run(str(ROOT / "examples" / "sft_from_engine.py"), "12", cwd=tmp_path, python=forked_python.python())
    assert out.splitlines()[-1] == "answer: Blue."
    assert (tmp_path / "runs" / "example-sft" / "trained" / "tokenizer_config.json").is_file()


@pytest.mark.nightly
def test_the_tutorial_runs_under_torchrun_and_its_loss_falls(tmp_path):
    program = str(ROOT / "examples" / "tutorial.py")
    out = run(
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
        program,
        cwd=tmp_path,
        python=forked_python.python(),
    )
    losses = [float(line.rsplit(" ", 1)[1]) for line in out.splitlines() if line.startswith("step ")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "version 1:" in out


def test_the_program_in_the_readme_runs_as_printed_but_for_its_model(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "path/to/qwen3" in block]
    model = build_model_dir(tmp_path / "model", "qwen3")
    program = block.replace("path/to/qwen3", str(model)) + "print(len(losses), inference.get_version())\n"
    (tmp_path / "program.py").write_text(program)
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=1", "--standalone"]
    out = run(*torchrun, "program.py", cwd=tmp_path, python=forked_python.python())
    assert out.split() == ["1", "1"]


@pytest.mark.nightly
def test_the_quickstart_goes_on_where_it_was_stopped_and_ends_with_a_model_and_a_picture(tmp_path):
    small = ["num_train=100", "num_held_out=16", "warm_steps=2"]
    command = ["-m", "rlite.cli", "quickstart", *small]
    run(*command, "steps=1", cwd=tmp_path)
    out = run(*command, "steps=2", cwd=tmp_path, python=forked_python.python())
    again = run(*command, "steps=2", cwd=tmp_path, python=forked_python.python())
    assert "raise steps, or choose another folder" in again
    folder = tmp_path / "runs" / "quickstart"
    assert "warm start" not in out.split("rlite ppo")[0]
    assert "held-out accuracy" in out
    assert (folder / "learning_curve.png").stat().st_size > 1000
    assert {"accuracy_before", "accuracy_after", "steps"} <= set(json.loads((folder / "summary.json").read_text()))
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]
    trained = {json.loads(line)["answer"] for line in (folder / "train.jsonl").read_text().splitlines()}
    held_out = {json.loads(line)["answer"] for line in (folder / "held_out.jsonl").read_text().splitlines()}
    assert not trained & held_out
