"""Random faults in every phase of jobs under the control plane; each job must end as if nothing had happened.

    python -m benchmarks.faults --count 210 --seed 0 --log faults.jsonl
    python -m benchmarks.faults --summary --log faults.jsonl
    python -m benchmarks.faults goodput --minutes 5
    python -m benchmarks.faults calm --minutes 30

Two kinds of jobs run. `roles`: actors, a rollout workload and a reward workload on a Ray cluster of three nodes
(`benchmarks.faults_program`). `ppo`: the ready PPO trainer, started by module path (`benchmarks.faults_ppo`). A job
suffers several faults, one after the other. Each happens to a process while it is in a certain phase: a signal, an
error, lost heartbeats of its node, the killed master of the job, or its killed Ray node. A job is sound if its weights
are bit-identical to those of the undisturbed job after each step, if each sample was used once, and if no process is
left. The log has one line for each fault. The command continues an existing log: the next faults are those that the
log has least of, so 210 faults meet `GOAL`. The exit status is 1 unless every job of this run was sound.

`--summary` prints the table of a log, and what it lacks. `goodput` measures what a fault each minute costs
(`benchmarks.faults_goodput`), and `calm` looks for alarms without a fault (`benchmarks.faults_calm`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks import faults_calm, faults_goodput
from benchmarks.faults_jobs import JOBS, FaultJob, World
from rlite.testing import KINDS, PHASES, Kind, Phase, PhaseFault

JobKind = Literal["roles", "ppo"]
PER_JOB = {"roles": 12, "ppo": 6}
TURNS = ["roles", "roles", "roles", "ppo"]
"""jobs in turn; those of roles are the cheaper ones"""
WEIGHTS: dict[Kind, float] = {"node": 0.2, "heartbeat": 0.3}
"""share of a kind beside the others; the default is 1"""


@dataclass(frozen=True)
class Goal:
    """Faults in sound jobs that a log is to have, beside each kind in each phase where it can happen."""

    in_all: int = 200
    in_each_phase: int = 15


GOAL = Goal()


@dataclass
class Row:
    """A fault, as the log has it."""

    number: int
    seed: int
    job: str
    phase: Phase
    kind: Kind
    role: str
    skip: int
    seconds: float = 0.0
    """from the fault to the end of the steps during which it happened"""
    is_identical: bool = False
    """the weights after each step of the job, and its samples"""
    problems: list[str] = field(default_factory=list)

    @property
    def fault(self) -> PhaseFault:
        return PhaseFault(phase=self.phase, kind=self.kind, role=self.role, skip=self.skip)

    @property
    def is_sound(self) -> bool:
        return self.is_identical and not self.problems


def read_log(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def draw(number: int, seed: int, job: str, rows: Iterable[Row], is_first: bool) -> Row:
    """A fault of the cells that the rows have least of. Only a job's first fault can happen in its creation."""
    numbers = random.Random(f"{seed}/{number}")
    seen = Counter((row.phase, row.kind) for row in rows if row.job == job)
    kinds = JOBS[job].kinds
    phases = [phase for phase in PHASES if (phase == "creation") == is_first]
    cells = [(phase, kind) for phase in phases for kind in KINDS if kind in kinds.get(phase, ())]
    numbers.shuffle(cells)
    phase, kind = min(cells, key=lambda cell: seen[cell] / WEIGHTS.get(cell[1], 1.0))
    role = numbers.choice(JOBS[job].roles[phase])
    skip = numbers.randint(0, JOBS[job].max_skip.get(phase, 0))
    return Row(number, seed, job, phase, kind, role, skip)


def draw_batch(rows: Sequence[Row], seed: int, job: str, size: int) -> list[Row]:
    """The faults of one more job."""
    batch: list[Row] = []
    for place in range(size):
        batch.append(draw(len(rows) + place, seed, job, [*rows, *batch], place == 0))
    return batch


def play(job: FaultJob, rows: Sequence[Row]) -> None:
    """Run a job with its faults, and note in the rows how it went."""
    job.begin([row.fault for row in rows])
    broken = ""
    for number, row in enumerate(rows):
        if broken:
            row.problems.append(f"not tried: {broken}")
            continue
        row.seconds, problem = job.suffer(number, row.fault)
        broken = problem
        row.problems += [problem] if problem else []
    problems = job.finish(broken)
    for row in rows:
        row.is_identical = not broken and not problems
        row.problems += problems


def run(count: int, seed: int, log: Path, kinds: Sequence[str]) -> list[Row]:
    """Play faults until there are `count` more, and append them to the log."""
    rows = read_log(log)
    fresh: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, World(Path(folder)) as world:
        turn = len(rows)
        while len(fresh) < count:
            kind = kinds[turn % len(kinds)]
            turn += 1
            batch = draw_batch(rows, seed, kind, min(PER_JOB[kind], count - len(fresh)))
            play(JOBS[kind](world, f"job-{len(rows)}", len(batch)), batch)
            rows += batch
            fresh += batch
            with log.open("a") as file:
                file.write("".join(json.dumps(asdict(row)) + "\n" for row in batch))
            for row in batch:
                print(f"{row.number:4} {row.job:6} {row.fault!s:50} {row.seconds:6.1f} s {'; '.join(row.problems)}")
            sys.stdout.flush()
    return fresh


def table(rows: Sequence[Row]) -> str:
    """Faults by phase and kind, with how many of them were in jobs that were not sound, and what is missing."""
    lines = [f"{'':14}" + "".join(f"{kind:>11}" for kind in KINDS) + f"{'all':>11}"]
    for phase in PHASES:
        of_phase = [row for row in rows if row.phase == phase]
        cells = [[row for row in of_phase if row.kind == kind] for kind in KINDS]
        lines.append(f"{phase:14}" + "".join(f"{_count(each):>11}" for each in [*cells, of_phase]))
    unsound = [row for row in rows if not row.is_sound]
    lines.append(f"{len(rows)} faults; in jobs that were not sound: {len(unsound)}")
    lines += [f"  {row.number}: {row.fault} ({row.job}): {'; '.join(row.problems)}" for row in unsound]
    lacks = missing(rows)
    return "\n".join([*lines, "still missing: " + "; ".join(lacks) if lacks else "nothing is missing"])


def _count(rows: Sequence[Row]) -> str:
    failed = sum(not row.is_sound for row in rows)
    return f"{len(rows)}" + (f" ({failed} bad)" if failed else "")


def missing(rows: Sequence[Row], goal: Goal = GOAL) -> list[str]:
    """Return the missing cases of a log, in words. Only faults of sound jobs count."""
    sound = [row for row in rows if row.is_sound]
    lacks = [f"{goal.in_all - len(sound)} faults"] if len(sound) < goal.in_all else []
    for phase in PHASES:
        kinds = [row.kind for row in sound if row.phase == phase]
        if len(kinds) < goal.in_each_phase:
            lacks.append(f"{goal.in_each_phase - len(kinds)} in {phase}")
        wanted = {kind for job in JOBS.values() for kind in job.kinds.get(phase, ())}
        lacks += [f"{kind} in {phase}" for kind in KINDS if kind in wanted and kind not in kinds]
    return lacks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["faults", "goodput", "calm"], default="faults")
    parser.add_argument("--count", type=int, default=210, help="faults of this run")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; default: another each time")
    parser.add_argument("--log", type=Path, default=Path("faults.jsonl"), help="continued if it exists")
    parser.add_argument("--jobs", nargs="+", choices=sorted(JOBS), default=TURNS, help="in turn")
    parser.add_argument("--summary", action="store_true", help="print the table of the log alone")
    parser.add_argument("--minutes", type=float, default=5.0, help="of goodput and calm")
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    match args.what:
        case _ if args.summary:
            print(table(read_log(args.log)))
        case "goodput":
            print(json.dumps(asdict(faults_goodput.measure(args.minutes, seed))))
        case "calm":
            calm = faults_calm.measure(args.minutes)
            print(json.dumps(asdict(calm), indent=1))
            raise SystemExit(1 if calm.alarms else 0)
        case _:
            raise SystemExit(0 if run_and_report(args.count, seed, args.log, args.jobs) else 1)


def run_and_report(count: int, seed: int, log: Path, jobs: Sequence[str]) -> bool:
    """Play faults, print the table of the log, and return True if each job was sound."""
    began = time.monotonic()
    print(f"seed {seed}", flush=True)
    fresh = run(count, seed, log, jobs)
    print(table(read_log(log)))
    print(f"{time.monotonic() - began:.0f} s")
    return all(row.is_sound for row in fresh)


if __name__ == "__main__":
    main()
