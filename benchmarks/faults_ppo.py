"""`rlite.trainer.ppo` with a fault point in each phase, for `benchmarks.faults`.

    python -m benchmarks.faults_ppo --config FILE

The fault points are in the folder that holds `trainer.save_dir`.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensordict import TensorDict

import rlite
from rlite import config
from rlite.assembly.command import run
from rlite.assembly.launch import init_devices
from rlite.assembly.workflows import RunWorkflows
from rlite.data.readers.tables import read_rows
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout import RolloutWorkflow
from rlite.rollout.environments.factory import environment_workflow
from rlite.testing import FaultBoard
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.interruption import has_begun

SAVING_S = 0.05
"""within which a fault during a checkpoint happens"""


class FaultyWorkflow(RolloutWorkflow):
    """A workflow with a fault point in each episode, while others run."""

    def __init__(self, inner: RolloutWorkflow, board: FaultBoard) -> None:
        self.inner, self.board, self.gconfig = inner, board, inner.gconfig

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        self.board.reach("rollout", "ROLLOUT")
        return await self.inner.arun_episode(engine, data)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # a copy has nothing yet
            raise AttributeError(name)
        return getattr(self.inner, name)


class FaultyPpoTrainer(PpoTrainer):
    """The PPO trainer. Its start after a failure is the phase recovery."""

    def __init__(self, options: PpoConfig, workflow: RolloutWorkflow, rows: Sequence[Any], board: FaultBoard) -> None:
        self.board, self.out = board, Path(options.trainer.save_dir).parent
        super().__init__(options, FaultyWorkflow(workflow, board), rows)

    def start(self) -> None:
        self.board.reach("recovery" if has_begun() else "creation", "TRAINER")
        super().start()
        self.wait_for_release()

    def update(self, batch: TensorDict) -> TensorDict:
        self.board.reach("training step", "TRAINER")
        return super().update(batch)

    def sync(self) -> None:
        self.board.reach("weight sync", "TRAINER")
        super().sync()

    def finish_step(self, batch: TensorDict) -> dict[str, float]:
        if (self.run.step + 1) % self.options.trainer.save_freq == 0:
            self.board.reach("checkpoint", "TRAINER")
            delay_s = random.Random(self.run.step).uniform(0.0, SAVING_S)
            timer = threading.Timer(delay_s, self.board.reach, ("checkpoint", "SAVING"))
            timer.start()
        metrics = super().finish_step(batch)
        self.wait_for_release()
        return metrics

    def wait_for_release(self) -> None:
        """Wait until the test lets the next step happen."""
        is_last = self.run.step >= self.options.trainer.total_steps
        while not is_last and (self.out / "paced").exists() and not (self.out / f"go-{self.run.step}").exists():
            time.sleep(0.01)


def main(argv: Sequence[str]) -> None:
    options = config.load(PpoConfig, argv)
    rollout, tokenizer = options.rollout, load_tokenizer(options.actor.model_name)
    make_workflow = environment_workflow(str(rollout.env_path), timeout=rollout.env_timeout, num_processes=2)
    rows = read_rows(str(options.train_data.path), key="train_data.path")
    init_devices(options)
    sampling = rollout.train_sampling_params.gconfig()
    workflow = make_workflow(sampling, tokenizer, rollout.max_turns, RunWorkflows(options).context_limit)
    FaultyPpoTrainer(options, workflow, rows, FaultBoard(Path(options.trainer.save_dir).parent)).fit()
    rlite.shutdown()


if __name__ == "__main__":
    run("faults_ppo", main, sys.argv[1:])
