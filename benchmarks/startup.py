"""Time that a person waits at the start: for `import rlite`, `rlite ppo --help`, the first line of `rlite ppo ...`.

    python -m benchmarks.startup

Prints the medians of 5 new processes of each: seconds, and seconds of CPU, which a busy machine does not change. The
first line is timed under plain Python, and in rank 0 of torchrun from its start. A run of `rlite ppo` is killed after
its first line.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

REPEATS = 5
TRAINER = ["actor.model_name=MODEL", "train_data.path=prompts.jsonl", "rollout.env_path=env.py"]
UNDER_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
"""environment of rank 0"""


def seconds_of(*command: str) -> float:
    """Return the seconds from the start of a Python process to its end."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def seconds_to_first_line(*command: str, **environment: str) -> float:
    """Return the seconds from the start of a Python process to the first line that it prints; the process is killed."""
    started = time.perf_counter()
    env = {**os.environ, **environment}
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    assert process.stdout is not None
    line, seconds = process.stdout.readline(), time.perf_counter() - started
    process.kill()
    process.communicate()
    assert line.startswith(b"rlite ppo: "), line
    return seconds


def with_cpu(measure: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds that a measurement returns, and the seconds of CPU that its processes took."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = cpu()
    return measure(), cpu() - before


def main() -> None:
    """Print the figures."""
    figures: dict[str, Callable[[], float]] = {
        "import rlite": lambda: seconds_of("-c", "import rlite"),
        "rlite ppo --help": lambda: seconds_of("-m", "rlite.cli", "ppo", "--help"),
        "first line of rlite ppo": lambda: seconds_to_first_line("-m", "rlite.cli", "ppo", *TRAINER),
        "first line of python -m rlite.trainer.ppo, rank 0": lambda: seconds_to_first_line(
            "-m", "rlite.trainer.ppo", *TRAINER, **UNDER_TORCHRUN
        ),
    }
    for name, measure in figures.items():
        walls, cpus = zip(*(with_cpu(measure) for _ in range(REPEATS)), strict=True)
        print(f"{median(walls):6.2f} s {median(cpus):6.2f} s of CPU  {name}", flush=True)


if __name__ == "__main__":
    main()
