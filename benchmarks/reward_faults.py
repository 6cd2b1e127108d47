"""Rollouts with failing rewards: a third hang, crash, eat memory, raise or return something other than a number.

    python -m benchmarks.reward_faults

Episodes with a scripted engine go through the collector. Of 1,000 rewards 10 % hang, 10 % crash, 5 % eat memory, 5 %
return nonsense and 5 % raise, each in several ways, in random order. Printed are the attempts by their outcome, the
reasons for which groups were lost, the seconds, and the processes that are left; the exit status is 1 unless each count
is exact, every other episode has its reward, no zombie is left when the batch is there, and no process after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from typing import Any

import psutil
import torch

from rlite.rollout import (
    CollectorOptions,
    GenerationHyperparameters,
    LLMRequest,
    RewardFunction,
    RolloutCollector,
    RolloutWorkflow,
    ScriptedEngine,
    trajectory,
)
from rlite.runtime.sandbox.pool import close_shared_pool

SHARES = {"timeout": 0.10, "crash": 0.10, "memory": 0.05, "invalid": 0.05, "raised": 0.05}
REWARD = 0.5
FAULTS = {
    "timeout": ("sleep", "deaf", "busy", "children", "coroutine", "stopped"),
    "crash": ("exit", "success", "segfault", "kill", "abort", "orphan", "closed", "garbage"),
    "memory": ("growth", "swallowed", "refused"),
    "invalid": ("nan", "infinite", "none", "text", "complex", "list", "huge", "mute"),
    "raised": ("raise", "quit", "wrapped"),
}
"""ways to end with each outcome"""


class Mute:
    """Value without a representation: `repr` raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def misbehave(fault: str, tag: str, **call: Any) -> Any:
    """A reward function that ends in the given way; its children bear the tag."""
    if fault == "deaf":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    if fault == "children":
        subprocess.Popen(["sleep", tag])
        subprocess.Popen(["sleep", tag], start_new_session=True)
    if fault == "busy":
        re.match("(a+)+$", "a" * 64 + "b")  # for ever, and holds the interpreter's lock
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "coroutine":
        return _sleep()
    if fault in FAULTS["timeout"]:
        time.sleep(3600)
    if fault in ("exit", "success"):
        os._exit(3 if fault == "exit" else 0)
    if fault == "orphan":  # a child that holds all that the process had open
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(4)
    if fault == "closed":
        os.closerange(3, 4096)
        time.sleep(3600)
    if fault == "garbage":
        for descriptor in range(3, 4096):
            _write_garbage(descriptor)
        time.sleep(3600)
    if fault in ("segfault", "kill", "abort"):
        number = {"segfault": signal.SIGSEGV, "kill": signal.SIGKILL, "abort": signal.SIGABRT}[fault]
        os.kill(os.getpid(), number)
    if fault == "refused":
        return len(bytearray(1 << 40))
    if fault in ("growth", "swallowed"):
        return _grow(is_swallowed=fault == "swallowed")
    if fault == "raise":
        raise KeyError("no such answer")
    if fault == "quit":
        raise SystemExit(0)
    if fault == "wrapped":
        raise BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("no")])
    odd = {
        "nan": float("nan"),
        "infinite": float("inf"),
        "none": None,
        "text": "1.0",
        "complex": 1j,
        "list": [1.0, 0.0],
        "huge": 10**400,
        "mute": Mute(),
    }
    return odd.get(fault, REWARD)


async def _sleep() -> None:
    time.sleep(3600)  # it blocks its event loop


def _write_garbage(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, b"\x08" + b"\0" * 7 + b"no frame")


def _grow(is_swallowed: bool) -> float:
    pieces = []
    try:
        while True:
            pieces.append(bytearray(b"x" * (4 << 20)))
    except MemoryError:
        if not is_swallowed:
            raise
        return 0.0


def build_faults(count: int, seed: int) -> list[tuple[str, str]]:
    """(outcome, way to it) of each reward, in random order; the ways take turns."""
    faults = [
        (outcome, FAULTS[outcome][index % len(FAULTS[outcome])])
        for outcome, share in SHARES.items()
        for index in range(round(share * count))
    ]
    faults += [("ok", "none of them")] * (count - len(faults))
    random.Random(seed).shuffle(faults)
    return faults


class Rewarded(RolloutWorkflow):
    """Generates, and asks for the reward that the item wants."""

    def __init__(self, reward: RewardFunction, tag: str) -> None:
        self.reward = reward
        self.tag = tag

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        request = LLMRequest(input_ids=[1], gconfig=GenerationHyperparameters(max_new_tokens=4))
        response = await engine.agenerate(request)
        return trajectory(response, reward=await self.reward.run(fault=data["fault"], tag=self.tag))


def run(count: int, timeout: float = 1.5, num_processes: int = 16, seed: int = 0) -> dict[str, Any]:
    """Run it; returns what was found beside what was expected, and `is_exact`."""
    faults = build_faults(count, seed)
    expected = Counter(outcome for outcome, _ in faults)
    tag = f"3600.{os.getpid()}"
    reward = RewardFunction(misbehave, timeout=timeout, num_processes=num_processes, memory_limit_gib=0.0625)
    options = CollectorOptions(request_retries=0, max_consecutive_failures=count)
    collector = RolloutCollector(ScriptedEngine([[2, 3, 4]]), options)
    close_shared_pool()
    others = set(psutil.Process().children(recursive=True))
    began = time.monotonic()
    try:
        batch = collector.rollout_batch([{"fault": fault} for _, fault in faults], Rewarded(reward, tag))
        seconds = time.monotonic() - began
        zombies = [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE and p not in others]
    finally:
        collector.close()
    left = [p for p in psutil.Process().children(recursive=True) if p not in others]
    left += [p for p in psutil.process_iter(["cmdline"]) if tag in (p.info["cmdline"] or ()) and p not in left]
    kept = [index for index, (outcome, _) in enumerate(faults) if outcome == "ok"]
    failed = {outcome: number for outcome, number in expected.items() if outcome != "ok"}
    report: dict[str, Any] = {
        "count": count,
        "seconds": round(seconds, 2),
        "expected": dict(expected),
        "outcomes": dict(reward.outcomes),
        "failed_attempts": dict(collector.failed_attempts),
        "lost": Counter(reason.partition(":")[0] for reason, n in collector.lost.items() for _ in range(n)),
        "rewarded": len(batch),
        "zombies": [str(process) for process in zombies],
        "left": [str(process) for process in left],
    }
    report["is_exact"] = (
        reward.outcomes == expected
        and collector.failed_attempts == failed
        and collector.lost.total() == sum(failed.values())
        and batch["group_ids"].tolist() == kept
        and torch.equal(batch["rewards"], torch.full((len(kept),), REWARD))
        and not zombies
        and not left
    )
    return report


def main() -> None:
    """Run and print; exits with 1 if a count is not exact or a process is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--timeout", type=float, default=1.5, help="seconds of each reward")
    parser.add_argument("--num-processes", type=int, default=16)
    args = parser.parse_args()
    report = run(args.count, args.timeout, args.num_processes)
    print(json.dumps(report, indent=2))
    raise SystemExit(0 if report["is_exact"] else 1)


if __name__ == "__main__":
    main()
