"""kill -9 at a random moment, resume, and nothing shows that it ever happened."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests import forked_python
from tests.integration.worlds import MARK, environment, free_port, processes_with, program_of
from tests.mixtures import build_mixture_dir
from tests.recorded import recorded, without_times

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = {"sft": 24, "ppo": 8, "grpo": 6, "experts": 4, "average": 6}
PROGRAMS = {"experts": "ppo", "average": "ppo"}
"""the trainer of a run that has a name of its own"""
LEFT = {
    "sft": ["step-21", "step-24"],
    "ppo": ["step-6", "step-6-critic", "step-8", "step-8-critic"],
    "grpo": ["step-4", "step-6"],
    "experts": ["step-2", "step-2-critic", "step-4", "step-4-critic"],
    "average": ["step-4", "step-6"],
}
EXPORTS = {"sft": ["latest", "best"], "ppo": ["latest", "critic_latest"], "grpo": ["latest"], "average": ["latest"]}
EXPORTS["experts"] = EXPORTS["ppo"]
MACHINE = ("second", "time", "memory", "mfu")
"""parts of names that only metrics of the machine have"""
RUN_S = 300.0
END_S = 20.0
"""in which what is left of a run must end when one of its processes was killed"""
ENVIRONMENT = """
async def step(state, action, extra_info):
    score = sum(letter.isalpha() for letter in action) / max(len(action), 1)
    return {"next_state": None, "reward": score, "score": score, "done": True, "extra_info": extra_info}

def told(row, answer, siblings):
    return row["prompt"] + siblings[0].text
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds sums of ragged length, and an environment."""
    folder = tmp_path_factory.mktemp("data")
    numbers = random.Random(0)
    rows = [[numbers.randrange(10 ** numbers.randint(1, 5)) for _ in range(2)] for _ in range(96)]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b)}) for a, b in rows]
    (folder / "sums.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+{b}="}) + "\n" for a, b in rows))
    (folder / "env.py").write_text(ENVIRONMENT)
    return folder


@pytest.fixture(scope="module")
def options(models: dict[str, Path], folder: Path) -> dict[str, list[str]]:
    """Return the options of a small run of a trainer, without the folder of its results.

    The model of "grpo" and "experts" has experts, which "experts" divides among two ranks. The student of "average" is
    taught by the moving average of its weights.
    """
    sft = [
        f"actor.model_name={models['qwen2']}",
        "actor.lr=1e-3",
        "actor.max_length_per_device=64",
        f"data.path={folder / 'sums.jsonl'}",
        "data.max_length=64",
        "data.batch_size=8",
        f"test_data.path={folder / 'sums.jsonl'}",
        "trainer.n_epochs=2",
        "trainer.save_freq=3",
        "trainer.test_freq=8",
        "trainer.best_metric=test_loss",
    ]
    ppo = [
        f"actor.model_name={models['qwen2']}",
        f"critic.model_name={models['qwen2']}",
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
        f"trainer.total_steps={STEPS['ppo']}",
        "trainer.save_freq=2",
    ]
    mixture = build_mixture_dir(folder / "mixture", "qwen3_moe")
    grpo = [
        *(option for option in ppo if not option.startswith(("critic", "adv", "actor.model_name", "trainer.total"))),
        f"actor.model_name={mixture}",
        "actor.routing_replay=rollout",
        f"trainer.total_steps={STEPS['grpo']}",
    ]
    experts = [
        *(option for option in ppo if not option.startswith(("critic", "actor.model_name", "trainer.total"))),
        *(f"{role}.{option}" for role in ("actor", "critic") for option in (f"model_name={mixture}", "ep_size=2")),
        *("kl.type=reward", "kl.reward_estimator=k1", "kl.coef=0.001", "actor.router_aux_loss_coef=0.001"),
        f"trainer.total_steps={STEPS['experts']}",
    ]
    average = [
        *(option for option in ppo if not option.startswith(("critic", "adv", "trainer.total"))),
        *("distill.teacher.weights=average", "distill.teacher.decay=0.5"),
        *(f"distill.teacher.context={folder / 'env.py'}:told", f"trainer.total_steps={STEPS['average']}"),
    ]
    return {"sft": sft, "ppo": ppo, "grpo": grpo, "experts": experts, "average": average}


def command(ranks: int, trainer: str, options: Sequence[str], save_dir: Path, *further: str) -> list[str]:
    program = [
        "-m",
        f"rlite.trainer.{PROGRAMS.get(trainer, trainer)}",
        *options,
        f"trainer.save_dir={save_dir}",
        *further,
    ]
    if ranks == 1:
        return program
    return ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={free_port()}", *program]


def run(argv: Sequence[str], python: str | None = None) -> None:
    """Run a program by this python, or its ranks by it and torchrun's agent as a fork. By default all are forks."""
    forked = forked_python.python()
    python = python or forked
    done = subprocess.run(
        [forked if is_torchrun(argv) else python, *argv],
        env=environment(PYTHON_EXEC=python),
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr


def is_torchrun(argv: Sequence[str]) -> bool:
    return "torch.distributed.run" in argv


Whole = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def whole(options: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """whole(trainer, ranks): the results of an undisturbed run, with all its checkpoints.

    The killed processes are forks of one. Here ranks of torchrun are new ones, which share nothing with them or with
    each other (the seed of hashes).
    """
    made: dict[tuple[str, int], Path] = {}

    def results(trainer: str, ranks: int) -> Path:
        if (trainer, ranks) not in made:
            save_dir = tmp_path_factory.mktemp("runs") / f"{trainer}-{ranks}"
            python = sys.executable if ranks > 1 else None
            run(command(ranks, trainer, options[trainer], save_dir, "trainer.keep=99"), python)
            made[trainer, ranks] = save_dir
        return made[trainer, ranks]

    return results


def run_and_kill(argv: Sequence[str], save_dir: Path, moments: random.Random, steps: int) -> str:
    """Kill a run's only process, or one of torchrun's, at a random moment after a random step; returns what and when.

    What is left of the run must end by itself, so the ranks of a torchrun are its children.
    """
    mark, metrics = uuid.uuid4().hex, save_dir / "metrics.jsonl"
    done = metrics.read_text().count("\n") if metrics.exists() else 0
    step, delay = min(moments.randrange(done, steps + 1) + 1, steps), moments.random() * 0.3
    with (save_dir.parent / "log").open("a") as log:
        variables = environment(**{MARK: mark, forked_python.RANKS: "children"})
        program = subprocess.Popen([forked_python.python(), *argv], env=variables, stdout=log, stderr=log)
        try:
            while program.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < step):
                time.sleep(0.01)
            time.sleep(delay)
            processes = [psutil.Process(program.pid)]
            if is_torchrun(argv):
                agent = program_of(program)
                processes = [agent, *agent.children()]
            place = moments.randrange(len(processes))
            processes[place].kill()
            program.wait(timeout=END_S)
            psutil.wait_procs(processes_with(MARK, mark), timeout=END_S)
            assert processes_with(MARK, mark) == [], f"left where process {place} of {processes} was killed"
        finally:
            for process in processes_with(MARK, mark):
                process.kill()
            program.wait()
    return f"process {place}, {delay:.3f} s after step {step}"


def curve(save_dir: Path, first: int, last: int) -> list[dict[str, float]]:
    """The metrics of every step but those of time and memory."""
    records = [json.loads(line) for line in (save_dir / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["step"] >= first]
    assert [record["step"] for record in records] == list(range(first, last + 1)), "each step is there once"
    return [
        {key: value for key, value in record.items() if not any(word in key for word in MACHINE)} for record in records
    ]


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ("sft", 1),
        pytest.param("ppo", 1, marks=pytest.mark.nightly),
        ("grpo", 1),
        pytest.param("sft", 2, marks=pytest.mark.nightly),
        pytest.param("ppo", 2, marks=pytest.mark.nightly),
        pytest.param("experts", 2, marks=pytest.mark.nightly),
        pytest.param("average", 1, marks=pytest.mark.nightly),
        pytest.param("average", 2, marks=pytest.mark.nightly),
    ],
)
def test_killed_run_ends_with_same_results(
    options: dict[str, list[str]], whole: Whole, tmp_path: Path, trainer: str, ranks: int
) -> None:
    seed = random.randrange(10**6)
    print(f"seed of the moments: {seed}")
    moments, broken, steps = random.Random(seed), tmp_path / "broken", STEPS[trainer]

    def argv() -> list[str]:
        return command(ranks, trainer, options[trainer], broken, "trainer.load_ckpt_from=latest")

    kills = [run_and_kill(argv(), broken, moments, steps) for _ in range(2)]
    run(argv())
    expected = whole(trainer, ranks)
    assert curve(broken, 1, steps) == curve(expected, 1, steps), f"killed: {kills}"
    for export in EXPORTS[trainer]:
        weights, found = (load_file(run / export / "model.safetensors") for run in (expected, broken))
        assert weights.keys() == found.keys()
        for name, tensor in weights.items():
            assert torch.equal(found[name], tensor), f"{export}: {name}, killed: {kills}"
    if trainer != "sft":
        for kind in ("rows", "tokens"):
            found, undisturbed = (without_times(recorded(run, kind=kind)) for run in (broken, expected))
            assert found == undisturbed, f"killed: {kills}"
    assert sorted(path.name for path in (broken / "state").iterdir()) == LEFT[trainer]


@pytest.mark.parametrize(("trainer", "step"), [("sft", 9), pytest.param("ppo", 4, marks=pytest.mark.nightly)])
def test_a_run_of_two_ranks_goes_on_as_one(
    options: dict[str, list[str]], whole: Whole, tmp_path: Path, trainer: str, step: int
) -> None:
    start, steps = whole(trainer, 2) / "state" / f"step-{step}", STEPS[trainer]
    argv = command(1, trainer, options[trainer], tmp_path / "alone", f"trainer.load_ckpt_from={start}")
    run(argv)
    pairs = zip(curve(tmp_path / "alone", step + 1, steps), curve(whole(trainer, 2), step + 1, steps), strict=True)
    for found, expected in pairs:
        for key in ("step", "num_tokens", "lr"):
            assert found[key] == expected[key], "the same rows"
        for key in found.keys() & {"loss", "test_loss", "reward", "critic/loss"}:
            assert found[key] == pytest.approx(expected[key], abs=1e-5), f"{key} at step {found['step']}"


@pytest.mark.nightly
def test_ppo_of_a_mixture_runs_under_torchrun_with_divided_experts(whole: Whole) -> None:
    records = curve(whole("experts", 2), 1, STEPS["experts"])
    for record in records:
        assert record["moe/replay_differs"] == 0.0
        assert record["routing_recorded"] == 1.0
        assert 1.0 <= record["moe/load_max"] <= 4.0
        assert record["moe/nonfinite_tokens"] == 0.0
        assert {"loss", "critic/loss", "critic/moe/load_max", "reward", "kl"} <= record.keys()
        assert all(math.isfinite(value) for value in record.values())


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(
    options: dict[str, list[str]], whole: Whole, models: dict[str, Path], tmp_path: Path
) -> None:
    start = whole("sft", 1) / "state" / "step-24"
    of_another = [f"actor.model_name={models['llama']}", *options["sft"][1:], f"trainer.load_ckpt_from={start}"]
    tried = subprocess.run(
        [forked_python.python(), *command(1, "sft", of_another, tmp_path / "run")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert tried.returncode != 0
    assert f"{start}: saved from PolicyModuleQwen2ForCausalLM, this engine has PolicyModuleLlama" in tried.stderr
    assert not (tmp_path / "run").exists()
