"""kill -9 at a random moment, resume, and nothing shows that it ever happened."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.worlds import environment, free_port, processes_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MARK = "RLITE_TEST_RUN"
STEPS = 36


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums of ragged length."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    numbers = random.Random(0)
    rows = [[numbers.randrange(10 ** numbers.randint(1, 5)) for _ in range(2)] for _ in range(4 * STEPS)]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b)}) for a, b in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def command(ranks: int, module: str, *options: str) -> list[str]:
    if ranks == 1:
        return [sys.executable, "-m", module, *options]
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={free_port()}"]
    return [sys.executable, *torchrun, "-m", module, *options]


def sft(model: Path, data: Path, save_dir: Path) -> list[str]:
    return [
        f"actor.model_name={model}",
        "actor.lr=1e-3",
        "actor.max_length_per_device=64",
        f"data.path={data}",
        "data.max_length=64",
        "data.batch_size=8",
        f"test_data.path={data}",
        "trainer.n_epochs=2",
        "trainer.save_freq=3",
        "trainer.test_freq=12",
        "trainer.best_metric=test_loss",
        "trainer.load_ckpt_from=latest",
        f"trainer.save_dir={save_dir}",
    ]


def run_and_kill(argv: Sequence[str], save_dir: Path, moment: random.Random, steps: int = STEPS) -> int:
    """Kill a program and all that it started after a random step, at a random moment of the next; returns the step."""
    mark = uuid.uuid4().hex
    step, delay = moment.randrange(1, steps), moment.random() * 0.1
    metrics = save_dir / "metrics.jsonl"
    with (save_dir.parent / "log").open("a") as log:
        program = subprocess.Popen(argv, env=environment(**{MARK: mark}), stdout=log, stderr=log)
        while program.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") >= step:
                time.sleep(delay)
                break
            time.sleep(0.002)
        for process in [program, *processes_with(MARK, mark)]:
            if process.pid != os.getpid():
                process.kill()
        program.wait()
    return step


def curve(save_dir: Path, steps: int = STEPS) -> list[dict[str, float]]:
    """The metrics of every step but those of the machine."""
    records = [json.loads(line) for line in (save_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, steps + 1)), "each step is there once"
    return [
        {
            key: value
            for key, value in record.items()
            if "second" not in key and key not in ("time", "timestamp", "memory_gib")
        }
        for record in records
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sft_that_was_killed_ends_as_if_it_had_not_been(
    models: dict[str, Path], data: Path, tmp_path: Path, ranks: int
) -> None:
    def argv(save_dir: Path) -> list[str]:
        return command(ranks, "rlite.trainer.sft", *sft(models["qwen2"], data, save_dir))

    seed = random.randrange(10**6)
    print(f"seed of the moments: {seed}")
    moment = random.Random(seed)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(argv(whole), env=environment(), check=True, capture_output=True, timeout=300)
    moments = [run_and_kill(argv(broken), broken, moment) for _ in range(3)]
    done = subprocess.run(argv(broken), env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert curve(broken) == curve(whole), f"killed after {moments}"
    for export in ("latest", "best"):
        expected = load_file(whole / export / "model.safetensors")
        found = load_file(broken / export / "model.safetensors")
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), f"{export}: {name}, killed after {moments}"
    left = sorted(path.name for path in (broken / "state").iterdir() if not path.name.startswith("."))
    assert left == ["step-33", "step-36"]


ENVIRONMENT = """
async def step(state, action, extra_info):
    score = sum(letter.isalpha() for letter in action) / max(len(action), 1)
    return {"next_state": None, "reward": score, "score": score, "done": True, "extra_info": extra_info}
"""


PPO_STEPS = 15


def ppo(model: Path, folder: Path, save_dir: Path) -> list[str]:
    (folder / "env.py").write_text(ENVIRONMENT)
    return [
        f"actor.model_name={model}",
        f"critic.model_name={model}",
        "adv.estimator=gae",
        "actor.lr=1e-3",
        f"train_data.path={folder / 'prompts.jsonl'}",
        "train_data.prompts_per_rollout=4",
        "train_data.responses_per_prompt=2",
        f"rollout.env_path={folder / 'env.py'}",
        "rollout.train_sampling_params.max_new_tokens=12",
        "rollout.max_num_seqs=5",
        "rollout.max_model_len=64",
        "rollout.deterministic=true",
        f"trainer.total_steps={PPO_STEPS}",
        "trainer.save_freq=3",
        "trainer.load_ckpt_from=latest",
        f"trainer.save_dir={save_dir}",
    ]


def test_ppo_that_was_killed_ends_as_if_it_had_not_been(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    rows = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))

    def argv(save_dir: Path) -> list[str]:
        return command(1, "rlite.trainer.ppo", *ppo(models["qwen2"], tmp_path, save_dir))

    seed = random.randrange(10**6)
    print(f"seed of the moments: {seed}")
    moment = random.Random(seed)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(argv(whole), env=environment(), check=True, capture_output=True, timeout=600)
    moments = [run_and_kill(argv(broken), broken, moment, PPO_STEPS) for _ in range(2)]
    done = subprocess.run(argv(broken), env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert curve(broken, PPO_STEPS) == curve(whole, PPO_STEPS), f"killed after {moments}"
    expected, found = (load_file(folder / "latest" / "model.safetensors") for folder in (whole, broken))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name}, killed after {moments}"
