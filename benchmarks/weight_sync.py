"""Speed of a weight sync to a colocated inference engine on CPU, compared with one thread's memcpy.

    python -m benchmarks.weight_sync --megabytes 256

A random float32 Llama of that size is built by a train engine and an inference engine on the same CPU slots, in
processes of their own (local Ray). After a warm-up sync, whose buffers later ones find mapped, `p2p_weight_sync` and a
single-threaded copy of as many bytes are timed in turns: once unsharded, once sharded over two workers at both ends.
The ratio is that of the medians.

The time for a plan is measured on layouts alone: those of 64 FSDP ranks that sync into 8 replicas of 8 tensor-parallel
ranks each, 288 tensors of 4096 x 4096. The first sync makes the plan, later syncs find it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import LlamaForCausalLM

import rlite
from rlite.engine.weights import SyncReport, known_plan
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.runtime.replicas.transport import Layout, Place
from tests.tiny import build_model_dir

LEAST = {1: 0.5, 2: 0.33}
"""ratio to memcpy that a sync over so many workers has to reach"""
HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 2816, 9216
SOURCE_RANKS, REPLICAS, REPLICA_RANKS, TENSORS, WIDTH = 64, 8, 8, 288, 4096


class Policy(HuggingFaceFsdp2TrainModule, LlamaForCausalLM):
    """Only its weights matter here."""


def build_checkpoint(path: Path, megabytes: int) -> Path:
    """A random untied Llama of about `megabytes` (2**20 bytes) in float32."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    per_layer = (2.5 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE) * 4 / 2**20
    layers = max(1, round((megabytes - 2 * HIDDEN * VOCABULARY * 4 / 2**20) / per_layer))
    shape: dict[str, Any] = {"intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY, **heads}
    return build_model_dir(path, "llama", tie=False, hidden=HIDDEN, layers=layers, **shape)


def gibibytes_per_second(copy: Any, num_bytes: int) -> float:
    """The rate of one call of `copy`."""
    begin = time.perf_counter()
    copy()
    return num_bytes / (time.perf_counter() - begin) / 2**30


def measure(path: Path, workers: int, repeats: int) -> dict[str, Any]:
    """Rates of syncs and of memcpy, in turns, and the last report."""
    serve = rlite.RliteInferenceEngine(path)
    serve.build(tensor_parallel_size=workers, data_parallel_size=1, max_model_len=16, max_num_seqs=1)
    with init_empty_weights():
        train = rlite.RliteTrainEngine(Policy.from_pretrained(path))
    train.build(tensor_parallel_size=workers, data_parallel_size=1, colocate_with=serve)
    report: SyncReport = train.p2p_weight_sync(serve)
    source, target = torch.ones(report.num_bytes, dtype=torch.uint8), torch.zeros(report.num_bytes, dtype=torch.uint8)
    syncs, copies = [], []
    for repeat in range(repeats + 1):
        copied = gibibytes_per_second(lambda: target.copy_(source), report.num_bytes)
        report = train.p2p_weight_sync(serve)
        if repeat > 0:
            syncs.append(report.num_bytes / report.seconds / 2**30)
            copies.append(copied)
    train.release()
    serve.release()
    return {
        "workers": workers,
        "megabytes": report.num_bytes / 2**20,
        "tensors": report.num_tensors,
        "transport": report.transport,
        "sync_gib_s": statistics.median(syncs),
        "memcpy_gib_s": statistics.median(copies),
        "ratio": statistics.median(syncs) / statistics.median(copies),
        "least_ratio": LEAST[workers],
    }


class _Target:
    """What a plan needs of an engine."""

    name = "inference"


def rows(ranks: int) -> list[Layout]:
    """Layouts of as many ranks, each with its share of the rows of every tensor."""
    size = WIDTH // ranks
    return [
        Layout(
            {
                f"layers.{number}.weight": Place(torch.bfloat16, (rank * size, 0), (size, WIDTH), (WIDTH, WIDTH))
                for number in range(TENSORS)
            },
            host="",
        )
        for rank in range(ranks)
    ]


def planning() -> dict[str, float]:
    """Seconds for the plan of the first sync and of a later one."""
    target: Any = _Target()
    seconds = []
    for _ in range(2):
        sources, replicas = rows(SOURCE_RANKS), [rows(REPLICA_RANKS) for _ in range(REPLICAS)]
        begin = time.perf_counter()
        for replica in replicas:
            known_plan(target, sources, replica)
        seconds.append(time.perf_counter() - begin)
    return {"first_plan_s": seconds[0], "later_plan_s": seconds[1]}


def main() -> None:
    """Parse, start, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args()

    torch.set_num_threads(1)
    rlite.init(device="cpu", num_devices=2, launcher="ray", num_threads=1)
    with tempfile.TemporaryDirectory() as folder:
        path = build_checkpoint(Path(folder) / "model", args.megabytes)
        results = [measure(path, workers, args.repeats) for workers in LEAST]
    rlite.shutdown()
    plan = planning()
    settings = {**vars(args), "dtype": "float32", "threads_per_worker": 1, "torch": torch.__version__}
    if args.json:
        print(json.dumps({"settings": settings, "results": results, **plan}))
        return
    print(f"settings: {settings}")
    for result in results:
        print(
            f"{result['workers']} worker(s) each, {result['megabytes']:.0f} MiB in {result['tensors']} tensors, "
            f"{result['transport']}: sync {result['sync_gib_s']:.2f} GiB/s, "
            f"one thread's memcpy {result['memcpy_gib_s']:.2f} GiB/s, "
            f"ratio {result['ratio']:.2f} (at least {result['least_ratio']})"
        )
    print(
        f"plan for {SOURCE_RANKS} sources and {REPLICAS} replicas of {REPLICA_RANKS} ranks, {TENSORS} tensors: "
        f"{plan['first_plan_s']:.2f} s at the first sync, {plan['later_plan_s']:.3f} s at each later one"
    )


if __name__ == "__main__":
    main()
