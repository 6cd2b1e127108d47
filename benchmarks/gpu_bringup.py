"""Bring a machine with a GPU up: does everything that needs one work there, how fast, and in how much memory?

    python -m benchmarks.gpu_bringup --out FOLDER                             every step, in their order
    python -m benchmarks.gpu_bringup --out FOLDER --steps ipc,generation      some of them, later in the same folder

Each step runs in a process of its own with a time limit: one that hangs or crashes costs only itself. Progress and
results are printed at once, and kept in FOLDER/STEP.json as they come: they survive if the command is killed. It ends
with one table (FOLDER/bringup.txt) and one record (FOLDER/bringup.json) of all steps that FOLDER knows. Steps for
which `--seconds` leaves no time are named, to be run by another command. Without a CUDA device the steps that need
none run in tiny sizes. The exit code is 0 if every step that was asked for ran and none failed.

Neither Ray nor a network is needed: a checkout of this repository, Python 3.12 on Linux x86-64 with torch 2.11 or newer
for CUDA, and the other packages as wheels in a folder. Make the folder where there is a network, and take it along:

    python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \\
        --platform manylinux2014_x86_64 --dest wheels -c constraints-cpu.txt -r benchmarks/gpu_bringup.txt

Then, in the checkout on the machine with the GPU:

    python3 -m pip install --no-index --no-deps --target site wheels/*.whl \\
        && PYTHONPATH=site python3 -m benchmarks.gpu_bringup --out results
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = "benchmarks.gpu_bringup_steps"


@dataclass(frozen=True)
class Step:
    """One thing to find out."""

    name: str
    """name of the function in `gpu_bringup_steps`"""
    seconds: float
    """limit of its process"""
    needs_gpu: bool
    what: str


PLAN = [
    Step("versions", 60, False, "versions, driver and device"),
    Step("attention", 90, False, "variable-length attention, forward and backward"),
    Step("training", 120, False, "training in bfloat16, with the optimizer offloaded"),
    Step("graphs", 120, True, "decode by CUDA graphs and eagerly"),
    Step("sync", 90, False, "weight sync inside one process"),
    Step("memory", 120, True, "memory that engines give back to the driver"),
    Step("ipc", 90, False, "20 rounds of weights from one process to another"),
    Step("sft", 150, False, "SFT at 8k tokens per pack"),
    Step("rl", 180, False, "RL at 16k tokens per pack"),
    Step("choices", 240, True, "the options that are off until a GPU has shown them"),
    Step("profile", 120, False, "profile of one training step"),
    Step("generation", 180, False, "generation, 256 sequences, top_p 1 and 0.9"),
]
LEAST_S = 15.0
"""a step is not begun with less time left"""


def watch(command: Sequence[str], limit: float, log: Path) -> tuple[str, str]:
    """Run a process, print and log its output line by line, and end it with all its children at the limit.

    Returns: status ("ok", "failed", "crashed" or "timed out") and, unless it is ok, the reason.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
    )
    last = [""]

    def tee() -> None:
        assert process.stdout is not None
        with log.open("w") as file:
            for line in process.stdout:
                print(f"    {line}", end="", flush=True)
                file.write(line)
                file.flush()
                last[0] = line.strip() or last[0]

    reader = threading.Thread(target=tee, daemon=True)
    reader.start()
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has left running
        process.wait()
        reader.join(5)
    if code is None:
        return "timed out", f"after {limit:.0f} s; last line: {last[0]}"
    if code < 0:
        return "crashed", f"{signal.Signals(-code).name}; last line: {last[0]}"
    return ("ok", "") if code == 0 else ("failed", last[0])


def run_step(step: Step, device: str, out: Path, limit: float) -> str:
    """Run one step in a process of its own; returns its status, which its file holds, too."""
    print(f"{step.name}: {step.what} (at most {limit:.0f} s)", flush=True)
    path = out / f"{step.name}.json"
    path.unlink(missing_ok=True)
    started = time.monotonic()
    command = [sys.executable, "-u", "-m", STEPS, step.name, "--device", device, "--out", str(out)]
    status, reason = watch(command, limit, out / f"{step.name}.log")
    results = read_record(path).get("results", {})
    seconds = time.monotonic() - started
    write_record(path, {"status": status, "reason": reason, "device": device, "seconds": seconds, "results": results})
    print(f"{step.name}: {status} in {seconds:.0f} s{': ' * bool(reason)}{reason}", flush=True)
    return status


def read_record(path: Path) -> dict[str, Any]:
    """Return what a step has written so far; nothing if it has not."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_record(path: Path, record: dict[str, Any]) -> None:
    write_whole(path, json.dumps(record, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: who is killed meanwhile leaves the one before."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def summary(out: Path) -> str:
    """Write the record of all steps that the folder knows, and return it as a table."""
    records = {step.name: read_record(out / f"{step.name}.json") for step in PLAN}
    write_record(out / "bringup.json", {name: record for name, record in records.items() if record})
    lines = [f"{'step':<12}{'status':<12}{'seconds':>8}  results"]
    for name, record in records.items():
        shown = ", ".join(f"{key} {_short(value)}" for key, value in record.get("results", {}).items())
        seconds = f"{record['seconds']:.0f}" if "seconds" in record else "-"
        line = f"{name:<12}{record.get('status', 'not run'):<12}{seconds:>8}  {record.get('reason') or ''} {shown}"
        lines.append(line.rstrip())
    table = "\n".join(lines) + "\n"
    write_whole(out / "bringup.txt", table)
    return table


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def find_device() -> str:
    """Ask a process of its own, which may hang or crash: a driver that is not well does so here first."""
    code = "import torch; print(torch.__version__, torch.cuda.is_available() and torch.cuda.get_device_name())"
    try:
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        sys.exit("torch did not say within 120 s whether there is a CUDA device")
    if answer.returncode:
        sys.exit(f"torch does not work here: {answer.stderr.strip()}")
    version, name = answer.stdout.strip().splitlines()[-1].split(" ", 1)
    if name == "False":
        print(f"torch {version} finds no CUDA device here: steps that need none run in tiny sizes on CPU", flush=True)
        return "cpu"
    print(f"torch {version} on {name}", flush=True)
    return "cuda"


def main(argv: Sequence[str]) -> int:
    """Run the steps; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in PLAN]
    parser.add_argument("--out", type=Path, default=Path("outputs/bringup"))
    parser.add_argument("--steps", default=",".join(names), help=f"of {','.join(names)}")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all steps together")
    args = parser.parse_args(argv)
    chosen = args.steps.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"--steps: {', '.join(sorted(unknown))}: expected some of {','.join(names)}")
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    device = find_device()
    statuses, late = [], []
    for step in (step for step in PLAN if step.name in chosen):
        left = end - time.monotonic()
        if step.needs_gpu and device == "cpu":
            write_record(args.out / f"{step.name}.json", {"status": "skipped", "reason": "it needs a CUDA device"})
        elif left < LEAST_S:
            late.append(step.name)
        else:
            statuses.append(run_step(step, device, args.out, min(step.seconds, left)))
            summary(args.out)
    print(summary(args.out), end="", flush=True)
    if late:
        print(f"no time was left for {', '.join(late)}: --out {args.out} --steps {','.join(late)}", flush=True)
    return int(bool(late) or any(status != "ok" for status in statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
