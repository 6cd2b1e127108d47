"""Seconds from the death of a worker to its detection, and to the end of the recovery, for a tiny model on Ray.

    python -m benchmarks.recovery [--runs 3] [--out recovery.json]

Real processes get SIGKILL: one worker of two inference replicas while they generate, and one of two train workers in
an optimizer step. Printed is a table with the median and the worst run, and the limits that this library promises for
a tiny model on 2 cores: 15 s for a replica and 30 s for a train executor. The exit status is 1 if a limit is missed,
or if a token or a weight is not as without the death.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import Qwen3ForCausalLM

import rlite
from benchmarks.model import build_model
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import WorkerError
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.runtime.cluster.group import apply_on_processes
from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse

LIMITS_S = {"replica": 15.0, "train": 30.0}
NUM_REQUESTS = 32


class Policy(HuggingFaceFsdp2TrainModule, Qwen3ForCausalLM):
    """AdamW on a language model."""

    def on_weights_materialized(self) -> None:
        """Make the optimizer."""
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)


def loss_fn(logits: Tensor, data: dict[str, Any]) -> Tensor:
    """Return the mean squared logit."""
    return logits.float().square().mean()


def loss_weight_fn(data: dict[str, Any]) -> Tensor:
    """Return the number of tokens."""
    return torch.tensor(float(data["input_ids"].numel()))


def process_of(engine: RliteInferenceEngine | RliteTrainEngine, rank: int) -> int:
    """Return the id of the process of one rank."""
    return apply_on_processes([(engine.group, rank, (), ())], os.getpid, [engine.group], "ask", 60)[0]


async def answers(engine: RliteInferenceEngine, on_chunk: Any = lambda chunk: None) -> list[LLMResponse]:
    """Return the completions of fixed requests, which all run at once."""
    gconfig = GenerationHyperparameters(max_new_tokens=200, ignore_eos=True, greedy=True)
    requests = [LLMRequest(input_ids=[1 + index, 2, 3], gconfig=gconfig) for index in range(NUM_REQUESTS)]
    return await asyncio.gather(*(engine.agenerate(request, on_chunk) for request in requests))


def lose_replica(model: Path) -> dict[str, float]:
    """Kill a worker of one of two replicas while both generate.

    Raises:
        AssertionError: a token is not as without the death.
    """
    engine = RliteInferenceEngine(model)
    engine.build(data_parallel_size=2, max_model_len=256, max_num_seqs=NUM_REQUESTS)
    expected = [response.output_tokens for response in asyncio.run(answers(engine))]
    pid = process_of(engine, 1)
    killed_at: list[float] = []

    def kill_once(_: Any) -> None:
        if not killed_at:
            killed_at.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

    async def all_answers() -> tuple[list[list[int]], float]:
        watching = asyncio.ensure_future(noticed(engine))
        made = await answers(engine, kill_once)
        return [response.output_tokens for response in made], await watching

    made, lost_at = asyncio.run(all_answers())
    engine.wait_for_replacements()
    recovered = time.monotonic() - killed_at[0]
    again = [response.output_tokens for response in asyncio.run(answers(engine))]
    if not (made == again == expected) or len(engine.replaced_replicas) != 1:
        raise AssertionError("the replica did not come back with the same tokens")
    engine.release()
    return {"detect": lost_at - killed_at[0], "recover": recovered}


async def noticed(engine: RliteInferenceEngine) -> float:
    """Return the time at which the engine has noticed a loss."""
    while not engine.lost_replicas:
        await asyncio.sleep(0.002)
    return time.monotonic()


def lose_train_worker(model: Path) -> dict[str, float]:
    """Kill one of two train workers while it trains, and recover from memory.

    Raises:
        AssertionError: a weight is not as without the death.
    """
    with init_empty_weights():
        module = Policy.from_pretrained(model)
    engine = RliteTrainEngine(module)
    engine.build(tensor_parallel_size=2, data_parallel_size=1)
    ids = torch.arange(64).view(4, 16)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    engine.train_batch(batch, loss_fn, loss_weight_fn)
    snapshot = engine.take_snapshot()
    engine.train_batch(batch, loss_fn, loss_weight_fn)
    expected = engine.state_dict()
    pid = process_of(engine, 1)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    try:
        while True:
            engine.train_batch(batch, loss_fn, loss_weight_fn)
    except WorkerError:
        detected = time.monotonic() - killed
    engine.recover(snapshot)
    recovered = time.monotonic() - killed
    engine.train_batch(batch, loss_fn, loss_weight_fn)
    weights = engine.state_dict()
    if not all(torch.equal(weights[name], expected[name]) for name in expected):
        raise AssertionError("the weights are not those of a run without the death")
    engine.release()
    return {"detect": detected, "recover": recovered}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rlite.init(device="cpu", num_devices=2, launcher="ray", num_threads=1)
    found: dict[str, list[dict[str, float]]] = {"replica": [], "train": []}
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder) / "model")
        for _ in range(args.runs):
            found["replica"].append(lose_replica(model))
            found["train"].append(lose_train_worker(model))
    rlite.shutdown()
    print(f"{'lost':<10}{'detect s':>12}{'recover s':>12}{'worst s':>12}{'limit s':>12}")
    is_missed = False
    for name, runs in found.items():
        detect, recover = ([run[key] for run in runs] for key in ("detect", "recover"))
        worst, limit = max(recover), LIMITS_S[name]
        is_missed |= worst > limit
        print(
            f"{name:<10}{statistics.median(detect):>12.2f}{statistics.median(recover):>12.2f}{worst:>12.2f}{limit:>12g}"
        )
    if args.out:
        args.out.write_text(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "runs": found}, indent=1))
    return int(is_missed)


if __name__ == "__main__":
    raise SystemExit(main())
