"""A small job for `benchmarks.faults`: REINFORCE on a table of bigrams by four roles, with fault points in each phase.

Everything depends on the options alone: prompts by position, samples by (seed, step, item), gradients in rank order.
The checkpoint holds the weights, the samples that they have used, and a digest of the weights after each step.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rlite import NeedParallel, files
from rlite.control import BaseTrainer, BaseWorkload
from rlite.errors import CallTimeout, WorkerDied, WorkerError
from rlite.testing import FaultBoard, Phase

VOCABULARY, LENGTH, BATCH, LR = 32, 6, 8, 0.5
SAVE_FREQ = 2
WHOLE_S = 600.0


def node_id() -> str:
    import ray  # the id of the node is Ray's alone

    return ray.get_runtime_context().get_node_id()


class Faulty(BaseWorkload):
    """A workload with fault points. Its first creation is the phase creation, later ones belong to a recovery."""

    def __init__(self, master_handle: Any, config: Any) -> None:
        super().__init__(master_handle, config)
        self.board = FaultBoard(config.out)
        self.weights = np.zeros((VOCABULARY, VOCABULARY))
        self.reach("recovery" if (Path(config.out) / "begun").exists() else "creation")

    def reach(self, phase: Phase) -> None:
        self.board.reach(phase, str(self.role), node_id())

    def write_weights(self, weights: np.ndarray) -> None:
        self.reach("weight sync")
        self.weights = weights.copy()

    def probabilities(self, token: int) -> np.ndarray:
        logits = self.weights[token] - self.weights[token].max()
        return np.exp(logits) / np.exp(logits).sum()


class Rollout(Faulty):
    def generate(self, step: int, items: list[int]) -> list[list[int]]:
        time.sleep(self.config.step_s)
        made = []
        for place, item in enumerate(items):
            if place == len(items) // 2:
                self.reach("rollout")
            draw = np.random.default_rng([self.config.seed, step, item])
            tokens = [item % VOCABULARY]
            for _ in range(LENGTH):
                tokens.append(int(draw.choice(VOCABULARY, p=self.probabilities(tokens[-1]))))
            made.append(tokens)
        return made


class Reward(Faulty):
    def score(self, rows: list[list[int]]) -> list[float]:
        self.reach("reward")
        return [sum(b == (a + 1) % VOCABULARY for a, b in pairwise(row)) / LENGTH for row in rows]


class Actor(Faulty):
    def gradient(self, rows: list[list[int]], advantages: list[float]) -> np.ndarray:
        self.reach("training step")
        total = np.zeros_like(self.weights)
        for row, advantage in zip(rows, advantages, strict=True):
            for before, after in pairwise(row):
                total[before] -= advantage * self.probabilities(before)
                total[before, after] += advantage
        return total

    def apply(self, gradient: np.ndarray) -> None:
        self.weights = self.weights + LR * gradient / BATCH

    def read(self) -> np.ndarray:
        return self.weights

    def save(self, facts: dict[str, Any]) -> None:
        if self.rank != 0:
            return
        path = Path(self.config.out) / "state.json"
        self.reach("checkpoint")
        files.replace(path, json.dumps({**facts, "weights": self.weights.tolist()}).encode())


class Trainer(BaseTrainer):
    """Trains to the last step. When a workload dies it waits for its successor, and goes on from the checkpoint."""

    def is_recoverable(self) -> bool:
        return True

    def init(self) -> None:
        self.out = Path(self.config.out)
        self.board = FaultBoard(self.out)
        begun = self.out / "begun"
        self.reach("recovery" if begun.exists() else "creation")
        begun.write_text("")

    def reach(self, phase: Phase) -> None:
        self.board.reach(phase, "TRAINER", node_id())

    def fit(self) -> None:
        (self.out / "trainer").write_text(str(os.getpid()))
        is_loaded = False
        while not is_loaded or self.step < self.config.steps:
            try:
                if not is_loaded:
                    self.load()
                    is_loaded = True
                self.wait_for_release()
                self.train()
            except (WorkerDied, WorkerError, CallTimeout):
                is_loaded = False
                for group in (self.RG_ACTOR, self.RG_ROLLOUT, self.RG_REWARD):
                    group.wait_until_whole(WHOLE_S)

    def load(self) -> None:
        path = self.out / "state.json"
        facts = json.loads(path.read_text()) if path.exists() else {"step": 0, "used": [], "digests": []}
        self.step, self.used, self.digests = facts["step"], facts["used"], facts["digests"]
        weights = np.array(facts.get("weights", np.zeros((VOCABULARY, VOCABULARY))))
        self.RG_ACTOR.write_weights(weights)
        self.RG_ROLLOUT.write_weights(weights)

    def wait_for_release(self) -> None:
        """Wait until the test lets this step happen."""
        while not (self.out / f"go-{self.step}").exists() and (self.out / "paced").exists():
            time.sleep(0.01)

    def train(self) -> None:
        items = list(range(self.step * BATCH, (self.step + 1) * BATCH))
        self.reach("rollout")
        parts = self.RG_ROLLOUT.generate(self.step, NeedParallel(items))
        rows = [row for part in parts for row in part]
        self.reach("reward")
        rewards = [reward for part in self.RG_REWARD.score(NeedParallel(rows)) for reward in part]
        advantages = [reward - sum(rewards) / len(rewards) for reward in rewards]
        self.reach("training step")
        gradient = sum(self.RG_ACTOR.gradient(NeedParallel(rows), NeedParallel(advantages)))
        self.RG_ACTOR.apply(gradient)
        self.reach("weight sync")
        weights = self.RG_ACTOR.read()[0]
        self.RG_ROLLOUT.write_weights(weights)
        self.step += 1
        self.used = [*self.used, *items]
        self.digests = [*self.digests, hashlib.sha256(weights.tobytes()).hexdigest()]
        if self.step % SAVE_FREQ == 0 or self.step == self.config.steps:
            self.reach("checkpoint")
            self.RG_ACTOR.save({"step": self.step, "used": self.used, "digests": self.digests})
