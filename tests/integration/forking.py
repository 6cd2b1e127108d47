"""A program whose processes fork: `forking.py MODEL LAUNCHER NUM_DEVICES`. Prints how each child ended, as JSON."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import rlite
from rlite.errors import RliteError
from tests.integration.modules import Policy, on_meta

LIMIT_S = 20.0


class Forking(Policy, LlamaForCausalLM):
    """Forks in a worker."""

    def fork(self, how: str) -> int | str:
        if (child := os.fork()) == 0:
            if how == "exit":
                sys.exit(3)
            if how == "raise":
                raise ValueError("in the child")
            return "the child answers"
        return ended(child)


def ended(child: int) -> int | str:
    """Return the exit code of the process, negative for a signal."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if (found := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(found[1])
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def check_refused(*acts: Callable[[], object]) -> None:
    """Exit with 1 unless each of them raises an error that speaks of the fork."""
    for act in acts:
        try:
            act()
        except RliteError as error:
            if "forked child" in str(error):
                continue
        sys.exit(1)


def main(model: str, launcher: str, num_devices: int) -> None:
    rlite.init(device="cpu", num_devices=num_devices, launcher=launcher, num_threads=1)  # type: ignore[arg-type]
    train = rlite.RliteTrainEngine(on_meta(Forking, model))
    train.build(tensor_parallel_size=num_devices)
    serve = rlite.RliteInferenceEngine(model)
    serve.build(tensor_parallel_size=num_devices, colocate_with=train, max_model_len=64, max_num_seqs=4)
    serve.generate([[1, 2]], {"max_tokens": 2})

    def call() -> None:
        check_refused(
            lambda: train.train_step([[1, 2]]),
            lambda: serve.generate([[1]], {"max_tokens": 2}),
            lambda: rlite.init(device="cpu", num_devices=1),
        )
        try:
            dist.all_reduce(torch.ones(1))
        except ValueError:
            sys.exit(0)
        sys.exit(1)

    def tidy() -> None:
        train.release()
        rlite.shutdown()
        gc.collect()

    children: dict[str, Callable[[], object]] = {
        "computes": lambda: torch.randn(300, 300) @ torch.randn(300, 300),
        "calls": call,
        "tidies up": tidy,
        "raises": lambda: 1 / 0,
    }
    results: dict[str, object] = {}
    for name, act in children.items():
        if (child := os.fork()) == 0:
            act()
            sys.exit(0)
        results[name] = ended(child)
    results["in a worker"] = [train.fork(how) for how in ("exit", "raise", "return")]
    results["parent"] = train.first_tokens([[7]])
    print(json.dumps(results), flush=True)
    if launcher == "ray":
        control = next(p for p in psutil.Process().children() if p.name().startswith("gcs_server"))
        control.kill()
        print(f"killed at {time.time()}", flush=True)
        train.first_tokens([[7]])
        time.sleep(0.5)
        train.first_tokens([[7]])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
