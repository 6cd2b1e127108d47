"""A torchrun script under the control plane: each rank is a workload, on one node or on several.

    python examples/control/torchrun_script.py FOLDER [STEPS]

The control plane gives the ranks their rendezvous and watches them. If a rank fails, all ranks start again with a new
rendezvous, and the script resumes from its checkpoint. On one node, a yaml file without any code does the same:
`trainer: my_script` with `num_processes: 2`; see docs/control.md.
"""

import os
import subprocess
import sys
from pathlib import Path

import rlite
from rlite.control import BaseTrainer, BaseWorkload, RLJobBuilder
from rlite.runtime.cluster.guard import Guard

SCRIPT = Path(__file__).with_name("ddp_script.py")
NUM_RANKS = 2


class Rank(BaseWorkload):
    """Runs the script as one rank, in a process that ends with this one."""

    def run(self) -> None:
        torchrun = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.torch_master_addr,
            "MASTER_PORT": self.torch_master_port,
        }
        guard = Guard()
        command = [sys.executable, self.config.script, self.config.folder, str(self.config.steps)]
        environment = {**os.environ, **guard.mark, **{name: str(value) for name, value in torchrun.items()}}
        try:
            subprocess.run(command, env=environment, check=True)
        finally:
            guard.close()


class Trainer(BaseTrainer):
    def init(self) -> None: ...

    def fit(self) -> None:
        self.RG_ACTOR.run()


def main(folder: Path, steps: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    job = RLJobBuilder().device_per_node(NUM_RANKS).device_type("CPU").trainer(Trainer)
    job = job.config({"script": str(SCRIPT), "folder": str(folder.resolve()), "steps": steps})
    job = job.actor(Rank).total(NUM_RANKS).per_node(NUM_RANKS).end()
    print(job.build().submit(job_name="torchrun-script"))
    rlite.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int((sys.argv[2:] or ["50"])[0]))
