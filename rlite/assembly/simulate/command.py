"""`rlite simulate`: steps per hour, waits, staleness and losses of asynchronous rollouts with other settings.

    rlite simulate runs/grpo rollout.max_head_offpolicyness=4 rollout_devices=2x loss_of_replicas=30%
    rlite simulate lengths=lognormal:256,1 seconds_per_token=0.02 seconds_update=12 failures=2%
        train_data.prompts_per_rollout=32 train_data.responses_per_prompt=8

Options that are not given are those of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlite import config, files
from rlite.assembly.simulate.options import SimulateConfig
from rlite.assembly.simulate.simulation import Simulation
from rlite.assembly.simulate.workload import make_workload
from rlite.errors import writing
from rlite.runtime.sandbox.pool import close_shared_pool
from rlite.services.console.terminal import ConsoleReporter

HOUR = 3600.0


def simulate(options: SimulateConfig) -> dict[str, Any]:
    """Return the answer as plain values.

    Raises:
        ConfigError: the run did not run ahead of training, or all replicas would be lost.
        DataError: the run's record or its metrics lack what a simulation needs.
        RolloutError: nothing can go on with these settings.
    """
    workload = make_workload(options)
    made = Simulation(workload, options.seed)
    made.run(options.steps)
    half, groups, seconds = options.steps // 2, made.staleness.total(), max(made.now, 1e-9)
    middle = made.ends[half - 1] if half else 0.0
    halves = [(half, middle), (options.steps - half, made.now - middle)]
    return {
        "steps_per_hour": HOUR * options.steps / seconds,
        "steps_per_hour_by_half": [HOUR * steps / max(time, 1e-9) for steps, time in halves],
        "seconds": made.now,
        "trainer_waits": made.trainer_waits / seconds,
        "rollouts_wait": made.empty_places / seconds,
        "staleness": {str(age): number / groups for age, number in sorted(made.staleness.items())},
        "lost": {reason: number / (groups + made.ledger.lost.total()) for reason, number in made.ledger.lost.items()},
        "replicas": workload.num_replicas,
        "lost_replicas": workload.num_lost,
        "slowdown": workload.slowdown,
        "notes": workload.notes,
    }


def table(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows in which the answer is printed."""
    halves = " and ".join(f"{number:,.1f}" for number in found["steps_per_hour_by_half"])
    return {
        "replicas": f"{found['replicas']}, of which {found['lost_replicas']} are lost after half of the steps",
        "a sequence is slower": f"by {found['slowdown']:.2%} for each further one on its replica",
        "steps per hour": f"{found['steps_per_hour']:,.1f}; in the first and the second half {halves}",
        "trainer waits for rollouts": f"{found['trainer_waits']:.1%} of the time",
        "rollouts wait for the trainer": f"{found['rollouts_wait']:.1%} of the places for groups are empty",
        "staleness in updates": ", ".join(f"{age}: {share:.1%}" for age, share in found["staleness"].items()),
        **{f"lost, {reason}": f"{share:.2%} of the groups" for reason, share in found["lost"].items()},
        **{f"note {number}": note for number, note in enumerate(found["notes"], 1)},
        "not counted": "evaluations, checkpoints, and what the devices do to each other",
    }


def main(argv: Sequence[str]) -> None:
    """Simulate, print the answer, and write it."""
    options = config.load(SimulateConfig, SimulateConfig.arguments(argv))
    try:
        found = simulate(options)
    finally:
        close_shared_pool()  # it has read the record
    ConsoleReporter().report("rlite simulate", table(found))
    if options.out is not None:
        with writing(path := Path(options.out).expanduser()):
            files.replace(path, json.dumps(found, indent=2).encode())
