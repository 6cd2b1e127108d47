"""Trainers that `rlite launch` starts by module path: watched, restarted with their budget, and exactly resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

import rlite
from rlite.control import JobHandle, JobResult, command
from rlite.control.entry import JobEntry, save_entry
from rlite.control.job import job_of
from rlite.control.spec import JobSpec
from rlite.runtime.cluster.guard import ranks_of
from rlite.runtime.cluster.ray.fleet import Fleet
from rlite.runtime.owner import Owner
from tests import forked_python
from tests.integration.worlds import environment, processes_with

pytestmark = pytest.mark.slow
START_S = 240.0
ROOT = Path(__file__).parents[2]
ENVIRONMENT = """
async def step(state, action, extra_info):
    score = sum(letter.isalpha() for letter in action) / max(len(action), 1)
    return {"next_state": None, "reward": score, "score": score, "done": True, "extra_info": extra_info}
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all tests, started by the first job."""
    yield
    rlite.shutdown()


def wait_for(is_there: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + START_S
    while not (found := is_there()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


def submit(name: str, trainer: str, config: dict[str, Any], **options: Any) -> JobHandle:
    given = {
        "device_per_node": 2,
        "device_type": "CPU",
        "backoff": 0.1,
        "global_env": {"OMP_NUM_THREADS": 1},
        **options,
    }
    handle = job_of(JobSpec(trainer=trainer, config=config, **given)).submit(name, blocking=False)
    assert isinstance(handle, JobHandle)
    return handle


def finish(handle: JobHandle) -> JobResult:
    result = handle.result(timeout=START_S)
    assert Fleet(handle.name).names() == []
    return result


def starts(out: Path) -> list[list[int]]:
    """Process id of each start, and whether it knew of an earlier one."""
    path = out / "starts"
    return [list(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def program(name: str, out: Path, steps: int = 2, config: dict[str, Any] | None = None, **options: Any) -> JobHandle:
    module = "tests.integration.reporting_program"
    return submit(name, module, {"out": str(out), "steps": steps, **(config or {})}, **options)


# -- a light program -----------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_dead_stopped_and_hung_programs_are_distinguished_and_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    health = {"stopped_after": 1.0, "hung_after": 2.0, "late_step": 2.0}
    run = program("light", tmp_path, health=health)
    wait_for(lambda: (report := run.record().report) is not None and report.total_steps == 2)
    pid = starts(tmp_path)[0][0]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "was killed by SIGKILL" in str(run.record().log))
    assert time.monotonic() - began < 40.0
    wait_for(lambda: len(starts(tmp_path)) == 2)
    began = time.monotonic()
    os.kill(starts(tmp_path)[1][0], signal.SIGSTOP)
    wait_for(lambda: "stopped: process" in str(run.record().log))
    assert time.monotonic() - began < 40.0
    wait_for(lambda: len(starts(tmp_path)) == 3)
    (tmp_path / "step-0").write_text("")
    wait_for(lambda: (report := run.record().report) is not None and report.step == 1)
    wait_for(lambda: "hung: a step (limit 2 s) is late" in str(run.record().log))
    wait_for(lambda: len(starts(tmp_path)) == 4)
    command.status(["light"])
    shown = capsys.readouterr().out
    assert "light: RUNNING, 3 restarts of the trainer, 0 of the job" in shown
    assert "  step 1 of 2, reported at" in shown
    assert "restart the trainer alone after" in shown
    (tmp_path / "step-1").write_text("")
    result = finish(run)
    assert result.succeeded, result
    assert result.restarts == 3
    assert [has_begun for _, has_begun in starts(tmp_path)] == [0, 1, 1, 1]
    assert not any(psutil.pid_exists(pid) for pid, _ in starts(tmp_path))


def test_a_program_that_computes_is_not_hung(tmp_path: Path) -> None:
    run = program("busy", tmp_path, 1, {"computes": True}, health={"hung_after": 1.0, "late_step": 1.0})
    wait_for(lambda: starts(tmp_path))
    time.sleep(4.0)
    (tmp_path / "step-0").write_text("")
    assert finish(run).restarts == 0


def test_a_killed_trainer_process_takes_its_program_with_it(tmp_path: Path) -> None:
    run = program("host", tmp_path, 1)
    pid = wait_for(lambda: starts(tmp_path))[0][0]
    host = psutil.Process(pid).parent()
    assert host is not None
    host.kill()
    wait_for(lambda: len(starts(tmp_path)) == 2)
    # a zombie has ended; the system's first process, which adopts it, may not have looked yet
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    (tmp_path / "step-0").write_text("")
    assert finish(run).restarts == 1


@pytest.mark.nightly
def test_a_program_without_restarts_left_ends_the_job_with_its_output(tmp_path: Path) -> None:
    (tmp_path / "step-0").write_text("")
    run = program("fire", tmp_path, 1, {"raises": True}, max_trainer_restarts=2)
    result = finish(run)
    assert not result.succeeded
    assert "ended with status 1; all 2 restarts of the trainer are used up" in result.error
    assert "ValueError: the disk is on fire" in "\n".join(map(str, result.events))
    assert len(starts(tmp_path)) == 3


def test_an_error_that_every_restart_would_meet_ends_the_job_at_once(tmp_path: Path) -> None:
    result = finish(program("refused", tmp_path, config={"refuse": True}))
    assert (result.succeeded, result.restarts) == (False, 0)
    assert result.error == "trainer failed: ConfigError: no such model"


def test_a_stopped_job_leaves_no_process_of_its_program(tmp_path: Path) -> None:
    run = program("ended", tmp_path)
    pid = wait_for(lambda: starts(tmp_path))[0][0]
    run.stop()
    assert not finish(run).succeeded
    wait_for(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize("how", ["save", "stay"])
def test_a_program_is_asked_to_save_before_a_stopped_job_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    run = program(f"asked-to-{how}", tmp_path, config={"at_sigterm": how, "trainer": {"save_dir": str(tmp_path)}})
    pid = wait_for(lambda: starts(tmp_path))[0][0]
    run.stop()
    wait_for((tmp_path / "asked").exists)
    if how == "stay":
        assert not run.record().state.has_ended
        run.stop()
    result = finish(run)
    assert (result.succeeded, result.is_stopped, len(starts(tmp_path))) == (False, True, 1)
    wait_for(lambda: not psutil.pid_exists(pid))
    capsys.readouterr()
    command.logs([str(tmp_path), "role=trainer", "--follow"])
    shown = capsys.readouterr().out.splitlines()
    assert "start 1" in shown
    assert ("step 1 is saved" in shown) == (how == "save")


@pytest.mark.nightly
def test_an_interrupted_launch_saves_and_its_job_is_found_by_its_folder(
    models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    config = {
        "actor": {"model_name": str(models["qwen2"])},
        "data": {"path": "sums.jsonl", "max_length": 64, "batch_size": 1},
        "trainer": {"save_dir": "run", "n_epochs": 100_000, "save_freq": 100_000},
    }
    job = {"device_per_node": 1, "device_type": "CPU", "trainer": "rlite.trainer.sft", "config": config}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    env = environment(RLITE_JOBS=str(tmp_path / "jobs"))

    def rlite_command(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rlite.cli", *arguments]
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=PIPE, stderr=STDOUT, text=True)

    with rlite_command("launch", "job.yaml") as launched:
        wait_for(lambda: num_steps(tmp_path / "run") >= 2 or launched.poll() is not None)
        with (
            rlite_command("logs", "run", "role=trainer", "--follow") as following,
            rlite_command("logs", "run", "role=events", "--follow") as following_events,
        ):
            shown, _ = rlite_command("status", "run").communicate(timeout=START_S)
            assert "rlite-job: RUNNING, 0 restarts" in shown
            launched.send_signal(signal.SIGINT)
            output, _ = launched.communicate(timeout=START_S)
            followed, _ = following.communicate(timeout=START_S)
            events, _ = following_events.communicate(timeout=START_S)
    assert launched.returncode == 130
    (saved,) = (tmp_path / "run" / "state").iterdir()
    step = saved.name.removeprefix("step-")
    said = f"ended by SIGTERM. Step {step} is saved. The same command goes on from there."
    assert f"rlite launch: ended by SIGINT. Job rlite-job: rlite sft: {said}" in output
    assert f"rlite sft: {said}" in followed
    assert "its submitter was interrupted" in events
    shown, _ = rlite_command("status", "rlite-job").communicate(timeout=START_S)
    assert "rlite-job: STOPPED, 0 restarts" in shown


def test_a_job_whose_launcher_was_killed_does_not_count_as_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLITE_JOBS", str(tmp_path / "jobs"))
    with subprocess.Popen(["sleep", "600"]) as launcher:
        owner = replace(Owner.of_this_process(), pid=launcher.pid)
        owner = replace(owner, started=psutil.Process(launcher.pid).create_time())
        save_entry(JobEntry("lost", "a" * 32, "127.0.0.1:1", run_folder=str(tmp_path / "run"), owner=owner))
        launcher.kill()
    command.status([str(tmp_path / "run")])
    assert (
        f"lost: ERROR, 0 restarts of the trainer, 0 of the job\n  error: process {owner.pid}" in capsys.readouterr().out
    )
    command.stop(["lost"])
    assert "job lost has ended already: ERROR" in capsys.readouterr().out


# -- the ready trainers --------------------------------------------------------------------------------------------


def num_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "latest" / "model.safetensors")


def rewards(folder: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line.get("reward"), line.get("loss")) for line in lines]


def with_folder(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**config, "trainer": {**config["trainer"], "save_dir": str(folder)}}


def undisturbed(config: dict[str, Any], module: str, folder: Path, *launcher: str) -> None:
    """Run the trainer without the control plane. The programs of jobs are no forks."""
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(with_folder(config, folder)))
    done = subprocess.run(
        [forked_python.python(), *launcher, "-m", module, "--config", str(file)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def ppo(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a run of `rlite.trainer.ppo`."""
    folder = tmp_path_factory.mktemp("ppo")
    (folder / "env.py").write_text(ENVIRONMENT)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(24)))
    return {
        "actor": {"model_name": str(models["qwen2"]), "lr": 1e-3},
        "train_data": {"path": str(folder / "prompts.jsonl"), "prompts_per_rollout": 4, "responses_per_prompt": 2},
        "rollout": {
            "env_path": str(folder / "env.py"),
            "train_sampling_params": {"max_new_tokens": 12},
            "max_num_seqs": 5,
            "max_model_len": 64,
            "deterministic": True,
        },
        "trainer": {"total_steps": 7, "save_freq": 2},
    }


@pytest.mark.nightly
def test_a_killed_ppo_trainer_resumes_and_ends_with_the_same_weights(ppo: dict[str, Any], tmp_path: Path) -> None:
    undisturbed(ppo, "rlite.trainer.ppo", tmp_path / "whole")
    broken = tmp_path / "broken"
    run = submit("ppo", "rlite.trainer.ppo", with_folder(ppo, broken))
    for step, number in ((2, signal.SIGKILL), (4, signal.SIGTERM)):
        wait_for(lambda: num_steps(broken) >= step)  # noqa: B023
        (victim,) = [each for each in processes_with("RLITE_RUN_HAS_BEGUN", str(int(step > 3))) if is_driver(each)]
        victim.send_signal(number)
        wait_for(lambda: not victim.is_running())  # noqa: B023
    result = finish(run)
    assert result.succeeded, result
    assert result.restarts == 2
    assert rewards(broken) == rewards(tmp_path / "whole")
    assert all(torch.equal(tensor, weights(broken)[name]) for name, tensor in weights(tmp_path / "whole").items())
    assert processes_with("RLITE_RUN_HAS_BEGUN", "1") == []


def is_driver(process: psutil.Process) -> bool:
    return "rlite.trainer.ppo" in process.cmdline()


@pytest.mark.nightly
def test_a_trainer_under_torchrun_resumes_after_a_killed_and_a_stopped_rank(
    models: dict[str, Path], tmp_path: Path
) -> None:
    rows = [json.dumps({"prompt": f"{n}+{n}=", "response": str(2 * n)}) for n in range(48)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    config = {
        "actor": {"model_name": str(models["qwen2"]), "lr": 1e-3},
        "data": {"path": str(tmp_path / "sums.jsonl"), "max_length": 64, "batch_size": 8},
        "trainer": {"n_epochs": 3, "save_freq": 2},
    }
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    undisturbed(config, "rlite.trainer.sft", tmp_path / "whole", *torchrun)
    broken = tmp_path / "broken"
    run = submit(
        "sft", "rlite.trainer.sft", with_folder(config, broken), num_processes=2, health={"stopped_after": 1.0}
    )
    for step, number in ((3, signal.SIGKILL), (7, signal.SIGSTOP)):
        wait_for(lambda: num_steps(broken) >= step)  # noqa: B023
        agents = processes_with("RLITE_RUN_HAS_BEGUN", str(int(step > 3)))
        (agent,) = [each for each in agents if "torch.distributed.run" in each.cmdline()]
        os.kill(sorted(ranks_of(agent.pid))[1], number)
        wait_for(lambda: not agent.is_running())  # noqa: B023
    result = finish(run)
    assert result.succeeded, result
    assert result.restarts == 2
    assert rewards(broken) == rewards(tmp_path / "whole")
    assert all(torch.equal(tensor, weights(broken)[name]) for name, tensor in weights(tmp_path / "whole").items())
