"""A job of the control plane's integration tests: it works until a file appears, and notes who worked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from rlite import files
from rlite.control import BaseTrainer, BaseWorkload, trainer_invocation
from rlite.errors import CallTimeout, WorkerDied


class Actor(BaseWorkload):
    def __init__(self, master_handle: Any, config: Any) -> None:
        super().__init__(master_handle, config)
        if config.get("refuse"):
            raise ValueError("no such model")
        self.steps = 0
        if config.get("spawns"):
            children = Path(config.out) / "children"
            children.mkdir(exist_ok=True)
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            (children / str(child.pid)).touch()

    def pid(self) -> int:
        return os.getpid()

    def rendezvous(self) -> tuple[str, int]:
        return self.torch_master_addr, self.torch_master_port

    def step(self) -> int:
        self.steps += 1
        return self.steps

    @trainer_invocation(is_async=True, timeout=0.5)
    def hang(self) -> None:
        time.sleep(0.0 if self.rank else 600.0)

    @trainer_invocation(is_async=True, timeout=0.5)
    def compute(self) -> None:
        until = time.monotonic() + (0.0 if self.rank else 4.0)
        while time.monotonic() < until:
            sum(range(10_000))


class Rollout(Actor):
    pass


class Trainer(BaseTrainer):
    def __init__(self, actor_handles: Any, actor_classes: Any, config: Any) -> None:
        super().__init__(actor_handles, actor_classes, config)
        hold = Path(config.out) / "hold"
        while hold.exists():
            (hold.parent / "held").write_text("")
            time.sleep(0.05)

    def init(self) -> None:
        self.out = Path(self.config.out)
        if self.config.get("stop") and not (self.out / "stopped").exists():
            (self.out / "stopped").write_text("")
            os.kill(os.getpid(), signal.SIGSTOP)

    def is_recoverable(self) -> bool:
        return bool(self.config.get("recoverable", False))

    def fit(self) -> None:
        pids = {"actors": self.RG_ACTOR.pid(), "trainer": os.getpid()}
        if self.rollouts:
            pids |= self.note_rollouts()
        with (self.out / "runs").open("a") as file:
            file.write(json.dumps(pids) + "\n")
        late = self.config.get("late")
        if late and not (self.out / "late").exists():
            (self.out / "late").write_text("")
            try:
                getattr(self.RG_ACTOR, late)()
            except CallTimeout:
                (self.out / "timed-out").write_text("")
        while not (self.out / "go").exists():
            self.RG_ACTOR.step()
            if self.rollouts:
                self.step_rollouts()
            time.sleep(0.05)
        (self.out / "steps").write_text(json.dumps(self.RG_ACTOR.step()))

    def step_rollouts(self) -> None:
        try:
            self.RG_ROLLOUT.step()
        except WorkerDied:
            self.RG_ROLLOUT.wait_until_whole(60.0)
            files.replace(self.out / "whole", json.dumps(self.note_rollouts()).encode())

    def note_rollouts(self) -> dict[str, Any]:
        return {"rollouts": self.RG_ROLLOUT.pid(), "rendezvous": self.RG_ROLLOUT.rendezvous()}
