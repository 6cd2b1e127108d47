"""Random faults in runs over every launcher, each followed by a resume; and attacks on the services of a run.

    python -m benchmarks.chaos [--quick] [--seed N] [--out chaos.json]

Small SFT and PPO runs in one process, under torchrun and on Ray lose their driver, agent, ranks, workers, control
service and reward processes to SIGKILL, SIGTERM, SIGSTOP and a full disk, at random moments. What is left must end by
itself, or go on; the same command then resumes. A run is bit-identical if its loss or reward at every step and its
final weights are those of a run that nobody disturbed. Hostile rewards, a long message and half-open connections attack
services in processes of their own. Printed is a table: tried, survived, bit-identical, seconds to detection. The exit
status is 1 unless everything survived. The whole takes about a quarter of an hour on 2 cores, `--quick` two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from benchmarks.chaos_attacks import ATTACKS
from benchmarks.injectors import FileSizeFault, NoTarget, ProcessFault, SignalFault, inject
from benchmarks.model import build_model
from rlite.runtime.cluster.guard import marked

ROOT = Path(__file__).parents[1]
MARK = "RLITE_CHAOS_RUN"
RUN_S = 300.0
"""longest run, and longest wait for a step"""
END_S = 45.0
"""in which what a fault left of a run must end"""
STEPS = {"sft": 24, "ppo": 18}
ENVIRONMENT = """
async def step(state, action, extra_info):
    score = sum(letter.isalpha() for letter in action) / max(len(action), 1)
    return {"next_state": None, "reward": score, "score": score, "done": True, "extra_info": extra_info}
"""
FAULTS: dict[str, list[ProcessFault]] = {
    "one": [
        SignalFault(role="driver", signal="SIGKILL"),
        SignalFault(role="driver", signal="SIGTERM"),
        SignalFault(role="driver", signal="SIGSTOP"),
        FileSizeFault(role="driver"),
    ],
    "torchrun": [
        SignalFault(role="rank", signal="SIGKILL", index=1),
        SignalFault(role="rank", signal="SIGTERM", index=1),
        SignalFault(role="agent", signal="SIGKILL"),
        SignalFault(role="driver", signal="SIGKILL"),
        SignalFault(role="agent", signal="SIGTERM"),
        SignalFault(role="rank", signal="SIGSTOP", index=1),
    ],
    "ray": [
        SignalFault(role="worker", signal="SIGTERM"),
        SignalFault(role="worker", signal="SIGKILL", index=1),
        SignalFault(role="control", signal="SIGKILL"),
        SignalFault(role="driver", signal="SIGTERM"),
        SignalFault(role="worker", signal="SIGSTOP", index=1),
    ],
}
SANDBOX: list[ProcessFault] = [
    SignalFault(role="sandbox", signal="SIGKILL"),
    SignalFault(role="sandbox", signal="SIGSTOP"),
]
"""a PPO run has processes for its rewards, too"""
PER_RUN = 6
QUICK = [("one", "ppo"), ("torchrun", "sft")]


@dataclass
class Row:
    """A line of the table."""

    setting: str
    fault: str
    tried: int = 0
    survived: int = 0
    identical: int = 0
    seconds: list[float] = field(default_factory=list)
    """from the fault to the end of the last process, where the run was to end"""
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Setting:
    """A launcher and a trainer, and the options of a run but for its folder."""

    launcher: str
    trainer: str
    options: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.launcher} {self.trainer}"

    def command(self, save_dir: Path) -> list[str]:
        program = ["-m", f"rlite.trainer.{self.trainer}", *self.options, f"trainer.save_dir={save_dir}"]
        program += [f"num_devices={2 if self.launcher != 'one' else 1}", "trainer.load_ckpt_from=latest"]
        if self.launcher != "torchrun":
            return [sys.executable, *program]
        launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={_free_port()}"]
        return [sys.executable, *launch, *program]


def build_settings(folder: Path, chosen: Sequence[tuple[str, str]]) -> list[Setting]:
    """Write a model, rows and an environment to `folder`; the runs that use them."""
    model = build_model(folder / "model")
    numbers = random.Random(0)
    sums = [[numbers.randrange(10 ** numbers.randint(1, 5)) for _ in range(2)] for _ in range(96)]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b)}) for a, b in sums]
    (folder / "sums.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+{b}="}) + "\n" for a, b in sums))
    (folder / "env.py").write_text(ENVIRONMENT)
    common = (f"actor.model_name={model}", "actor.lr=1e-3", "trainer.save_freq=2")
    options = {
        "sft": (
            *common,
            f"data.path={folder / 'sums.jsonl'}",
            "data.max_length=64",
            "data.batch_size=8",
            "trainer.n_epochs=2",
        ),
        "ppo": (
            *common,
            f"train_data.path={folder / 'prompts.jsonl'}",
            "train_data.prompts_per_rollout=4",
            "train_data.responses_per_prompt=2",
            f"rollout.env_path={folder / 'env.py'}",
            "rollout.env_timeout=20",
            "rollout.train_sampling_params.max_new_tokens=12",
            "rollout.max_num_seqs=5",
            "rollout.max_model_len=64",
            "rollout.deterministic=true",
            f"trainer.total_steps={STEPS['ppo']}",
        ),
    }
    return [Setting(launcher, trainer, options[trainer]) for launcher, trainer in chosen]


class Program:
    """One start of a run; `with` leaves no process of it."""

    def __init__(self, setting: Setting, save_dir: Path) -> None:
        self.metrics = save_dir / "metrics.jsonl"
        self._mark = uuid.uuid4().hex
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: self._mark}
        with (save_dir.parent / f"{save_dir.name}.log").open("a") as log:
            self.process = subprocess.Popen(setting.command(save_dir), env=environment, stdout=log, stderr=log)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.left():
            process.kill()
        self.process.wait()

    def num_steps(self) -> int:
        """Steps in the metrics; of a resumed run, those of its former life, too."""
        return self.metrics.read_text().count("\n") if self.metrics.exists() else 0

    def wait_for(self, step: int) -> bool:
        """Wait until the metrics have this step; False if the run ended, or took too long."""
        ends = time.monotonic() + RUN_S
        while self.num_steps() < step:
            if self.process.poll() is not None or time.monotonic() > ends:
                return self.num_steps() >= step
            time.sleep(0.01)
        return True

    def left(self) -> list[psutil.Process]:
        """Living processes that this start has left, and their children."""
        return marked(self._mark, MARK)

    def wait_for_end(self, seconds: float) -> bool:
        """Wait for the end of every process; False if one goes on."""
        ends = time.monotonic() + seconds
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        while left := self.left():
            if time.monotonic() > ends:
                return False
            psutil.wait_procs(left, timeout=0.2)
        return True


def disturb(setting: Setting, save_dir: Path, faults: Sequence[ProcessFault], moments: random.Random) -> list[Row]:
    """Let the faults happen one after the other, with a resume after each that ends the run, then finish it."""
    rows: list[Row] = []
    todo = list(faults)
    for _ in range(2 * len(faults)):  # starts; a run that is broken for good must not be started for ever
        with Program(setting, save_dir) as program:
            while todo and _disturb_once(setting, program, todo, moments, rows):
                pass
            is_finished = not todo and program.wait_for_end(RUN_S) and program.process.returncode == 0
        if is_finished:
            break
    return rows


def _disturb_once(
    setting: Setting, program: Program, todo: list[ProcessFault], moments: random.Random, rows: list[Row]
) -> bool:
    """One fault at a random moment of the next steps; False if the run has to be started again."""
    last, done = STEPS[setting.trainer], program.num_steps()
    step = min(done + moments.randint(1, 2), last - 1)
    if not program.wait_for(step):
        if program.process.poll() is None or program.process.returncode != 0:
            rows.append(Row(str(setting), str(todo.pop(0)), tried=1, reasons=["the run did not come to the next step"]))
        else:
            todo.clear()  # it came to its end before the next fault
        return False
    time.sleep(moments.random() * 0.3)
    fault = todo[0]
    began = time.monotonic()
    try:
        inject(fault, program.process.pid)
    except NoTarget as reason:
        if program.process.poll() is None and not str(fault).endswith("sandbox"):
            rows.append(Row(str(setting), str(todo.pop(0)), tried=1, reasons=[str(reason)]))
        elif program.process.poll() is None:
            time.sleep(0.05)  # its processes have not started yet
        return program.process.poll() is None
    todo.pop(0)
    row = Row(str(setting), str(fault), tried=1)
    rows.append(row)
    if fault.ends_run:
        row.survived = int(program.wait_for_end(END_S))
        if program.process.returncode == 0:  # it had just come to its end by itself
            rows.remove(row)
            todo.clear()
            return False
        row.seconds = [time.monotonic() - began] if row.survived else []
        row.reasons = [] if row.survived else [f"after {END_S:g} s there were {program.left()}"]
        return False
    row.survived = int(program.wait_for(min(step + 2, last)))
    row.reasons = [] if row.survived else ["the run did not go on"]
    return bool(row.survived) and program.process.poll() is None


def is_identical(expected: Path, found: Path) -> bool:
    """Every step is there once, with the same loss or reward, and the final weights are the same bits."""
    try:
        curves = [_curve(folder) for folder in (expected, found)]
        weights = [load_file(folder / "latest" / "model.safetensors") for folder in (expected, found)]
    except (OSError, ValueError):
        return False
    return (
        curves[0] == curves[1]
        and weights[0].keys() == weights[1].keys()
        and all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    )


def _curve(folder: Path) -> list[tuple[Any, ...]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record.get("loss"), record.get("reward")) for record in records]


def run_setting(setting: Setting, folder: Path, faults: Sequence[ProcessFault], moments: random.Random) -> list[Row]:
    """An undisturbed run and a disturbed one of the same setting."""
    expected, found = folder / f"{setting}-whole", folder / f"{setting}-broken"
    with Program(setting, expected) as program:
        if not program.wait_for_end(RUN_S) or program.process.returncode != 0:
            log = (folder / f"{expected.name}.log").read_text()
            raise SystemExit(f"{setting}: the run without any fault failed:\n{log[-3000:]}")
    rows = disturb(setting, found, faults, moments)
    same = is_identical(expected, found)
    for row in rows:
        row.identical = int(same)
        if not same:
            row.reasons.append("not bit-identical in the end")
    return rows


def run_attack(name: str, folder: Path) -> Row:
    """One attack, in a process of its own."""
    row, out = Row("services", name, tried=1), folder / f"{name}.json"
    try:
        command = [sys.executable, "-m", "benchmarks.chaos_attacks", name, str(out)]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    except subprocess.TimeoutExpired:
        row.reasons.append(f"no end within {RUN_S:g} s")
        return row
    if not out.exists():
        row.reasons.append(f"it ended with status {ran.returncode}: {ran.stderr[-500:]}")
        return row
    row.reasons = json.loads(out.read_text())["faults"]
    row.survived = int(not row.reasons)
    return row


def merge(rows: Sequence[Row]) -> list[Row]:
    """One row for each setting and fault."""
    merged: dict[tuple[str, str], Row] = {}
    for row in rows:
        whole = merged.setdefault((row.setting, row.fault), Row(row.setting, row.fault))
        whole.tried += row.tried
        whole.survived += row.survived
        whole.identical += row.identical
        whole.seconds += row.seconds
        whole.reasons += row.reasons
    return list(merged.values())


def show(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [f"{'setting':<14}{'fault':<24}{'tried':>6}{'survived':>10}{'identical':>11}{'detected':>10}"]
    for row in rows:
        seconds = f"{statistics.median(row.seconds):.1f} s" if row.seconds else "-"
        identical = "-" if row.setting == "services" else str(row.identical)
        lines.append(f"{row.setting:<14}{row.fault:<24}{row.tried:>6}{row.survived:>10}{identical:>11}{seconds:>10}")
        lines += [f"    {reason}" for reason in dict.fromkeys(row.reasons)]
    every = [second for row in rows for second in row.seconds]
    runs = [row for row in rows if row.setting != "services"]
    lines.append(
        f"{'all':<38}{sum(row.tried for row in rows):>6}{sum(row.survived for row in rows):>10}"
        f"{sum(row.identical for row in runs):>11}{f'{statistics.median(every):.1f} s' if every else '-':>10}"
    )
    return "\n".join(lines)


def run(quick: bool, seed: int, folder: Path) -> list[Row]:
    """Everything, or a handful; rows that are merged by setting and fault."""
    moments = random.Random(seed)
    every = [(launcher, trainer) for launcher in FAULTS for trainer in ("sft", "ppo")]
    rows = []
    for setting in build_settings(folder, QUICK if quick else every):
        faults = [*FAULTS[setting.launcher], *(SANDBOX if setting.trainer == "ppo" else [])]
        moments.shuffle(faults)
        count = 2 if quick else PER_RUN
        rows += run_setting(setting, folder, list(islice(cycle(faults), count)), moments)
        print(f"{setting}: {sum(row.survived for row in rows)} of {sum(row.tried for row in rows)}", flush=True)
    rows += [run_attack(name, folder) for name in (["half-open connections"] if quick else ATTACKS)]
    return merge(rows)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Run, print the table; exit with 1 unless everything survived and every run was bit-identical."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a handful of faults")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: another each time")
    parser.add_argument("--out", type=Path, help="write the table as JSON, too")
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    began = time.monotonic()
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = run(args.quick, seed, Path(folder))
    print(show(rows))
    print(f"{time.monotonic() - began:.0f} s")
    if args.out is not None:
        args.out.write_text(json.dumps([vars(row) for row in rows], indent=2))
    runs = [row for row in rows if row.setting != "services"]
    is_whole = all(row.survived == row.tried for row in rows) and all(row.identical == row.tried for row in runs)
    raise SystemExit(0 if is_whole else 1)


if __name__ == "__main__":
    main()
