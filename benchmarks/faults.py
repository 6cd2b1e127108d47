"""Random faults in every phase of jobs under the control plane; each job must end as if nothing had happened.

    python -m benchmarks.faults --count 200 --seed 0 --log faults.jsonl

Two kinds of jobs run. `roles`: actors, a rollout workload and a reward workload on a Ray cluster of three nodes
(`benchmarks.faults_program`). `ppo`: the ready PPO trainer, started by module path (`benchmarks.faults_ppo`). A job
suffers several faults, one after the other. Each happens to a process while it is in a certain phase: a signal, an
error, lost heartbeats of its node, the killed master of the job, or its killed Ray node. A job is sound if its weights
are bit-identical to those of the undisturbed job after each step, if each sample was used once, and if no process is
left. The log has one line for each fault. The command continues an existing log: the next faults are those that the
log has least of. The exit status is 1 unless every job of this run was sound.
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

from benchmarks.faults_jobs import JOBS, FaultJob, World
from rlite.recovery.faults import KINDS, PHASES, Kind, Phase, PhaseFault

JobKind = Literal["roles", "ppo"]
PER_JOB = {"roles": 8, "ppo": 5}
WEIGHTS: dict[Kind, float] = {"node": 0.2, "heartbeat": 0.3}
"""share of a kind beside the others; the default is 1"""


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


def run(count: int, seed: int, log: Path, kinds: Sequence[str], per_job: int | None = None) -> list[Row]:
    """Play faults until there are `count` more, and append them to the log."""
    rows = read_log(log)
    fresh: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, World(Path(folder)) as world:
        turn = len(rows)
        while len(fresh) < count:
            kind = kinds[turn % len(kinds)]
            turn += 1
            batch: list[Row] = []
            for place in range(min(per_job or PER_JOB[kind], count - len(fresh))):
                batch.append(draw(len(rows) + place, seed, kind, [*rows, *batch], place == 0))
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
    """Faults by phase and kind, with those of jobs that were not sound."""
    lines = [f"{'':14}" + "".join(f"{kind:>11}" for kind in KINDS) + f"{'all':>8}"]
    for phase in PHASES:
        of_phase = [row for row in rows if row.phase == phase]
        counts = [sum(row.kind == kind for row in of_phase) for kind in KINDS]
        lines.append(f"{phase:14}" + "".join(f"{count:11}" for count in counts) + f"{len(of_phase):8}")
    unsound = [row for row in rows if not row.is_sound]
    lines.append(f"{len(rows)} faults; in jobs that were not sound: {len(unsound)}")
    lines += [f"  {row.number}: {row.fault} ({row.job}): {'; '.join(row.problems)}" for row in unsound]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="faults of this run")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; default: another each time")
    parser.add_argument("--log", type=Path, default=Path("faults.jsonl"), help="continued if it exists")
    parser.add_argument("--jobs", nargs="+", choices=sorted(JOBS), default=["roles", "roles", "ppo"], help="in turn")
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    began = time.monotonic()
    print(f"seed {seed}", flush=True)
    fresh = run(args.count, seed, args.log, args.jobs)
    print(table(read_log(args.log)))
    print(f"{time.monotonic() - began:.0f} s")
    raise SystemExit(0 if all(row.is_sound for row in fresh) else 1)


if __name__ == "__main__":
    main()
