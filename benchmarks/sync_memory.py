"""Memory that a weight sync of a mixture of experts takes beside the weights of both engines.

    python -m benchmarks.sync_memory [--layers 3]

A Qwen3-MoE whose layers have 64 experts (float32, 256 MiB of gate and up projections and 128 MiB of down projections
in each layer) is trained by two workers with `ep_size=2`, and served by a replica on each. Every transport makes a
sync. Printed is the most memory that one process takes during a sync beside its memory before, also as a share of a
block: the experts of one layer. Memory is the proportional set size, in which shared memory counts once. A thread reads
it every few milliseconds.

The last line is about the conversion to the names of a checkpoint, which has a tensor for each expert, as vLLM, SGLang
and exports take them: the most memory beside the model's if each tensor is dropped when it was read.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import rlite

# rlite before torch: it sets how idle threads wait, which torch reads once
import torch  # isort: skip

from rlite.backends.models.stored import StoredCheckpoint
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.engine.weights import Transport, sync_weights
from rlite.nn.pretrained import load_config, meta_model
from rlite.trainer.model.modules import policy_module
from tests.integration.worlds import process_of
from tests.mixtures import build_mixture_dir

MIB = 2**20
SHAPE = {"hidden_size": 512, "moe_intermediate_size": 1024, "num_experts": 64, "mlp_only_layers": []}
BLOCK = 3 * 64 * 512 * 1024 * 4
"""bytes of the experts of a layer"""
TRANSPORTS: tuple[Transport, ...] = ("shared", "gathered", "broadcast")


def memory(processes: list[int]) -> list[int]:
    """Return the proportional set sizes of the processes in bytes."""
    texts = [Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes]
    return [int(re.findall(r"^Pss: +(\d+)", text, re.MULTILINE)[0]) * 1024 for text in texts]


@dataclass
class Peak:
    """Memory of processes while a block runs."""

    before: list[int]
    most: list[int]
    after: list[int]

    @property
    def used(self) -> int:
        """The most that one process took beside its memory before, in bytes."""
        return max(most - before for most, before in zip(self.most, self.before, strict=True))

    @property
    def kept(self) -> int:
        """The most that one process kept, in bytes."""
        return max(after - before for after, before in zip(self.after, self.before, strict=True))


@contextmanager
def peak_of(processes: list[int]) -> Iterator[Peak]:
    """Watch the memory of processes during a block."""
    begin, is_done = memory(processes), threading.Event()
    found = Peak(begin, begin, begin)

    def watch() -> None:
        while not is_done.wait(0.002):
            found.most = [*map(max, found.most, memory(processes))]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        is_done.set()
        thread.join()
    found.after = memory(processes)


def convert(path: Path) -> int:
    """Convert a whole model, drop each tensor when it was copied, and return the most memory beside the model's."""
    model = meta_model(load_config(str(path)))
    conversion = StoredCheckpoint(model, path).conversion
    held = [(name, torch.ones(tensor.shape)) for name, tensor in model.named_parameters()]
    with peak_of([os.getpid()]) as found:
        for _, tensor in conversion.stored(iter(held)):
            tensor.contiguous().sum()
    return found.used


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    asked = parser.parse_args()
    rlite.init(device="cpu", num_devices=2, launcher="ray", num_threads=1)
    with tempfile.TemporaryDirectory() as scratch:
        path = build_mixture_dir(Path(scratch) / "model", "qwen3_moe", num_hidden_layers=asked.layers, **SHAPE)
        gc.collect()
        serve = RliteInferenceEngine(path)
        serve.build(data_parallel_size=2, max_model_len=16, max_num_seqs=1, dtype="float32")
        train = RliteTrainEngine(policy_module(path))
        train.build(tensor_parallel_size=2, data_parallel_size=1, ep_size=2, colocate_with=serve)
        processes = sorted({process_of(train, 0), process_of(train, 1), process_of(serve, 0), process_of(serve, 1)})
        weights = sum(each["weights"] for each in train.memory_bytes())
        print(f"{weights / MIB:.0f} MiB of weights, {BLOCK / MIB:.0f} MiB in the experts of a layer")
        for transport in TRANSPORTS:
            for number in (1, 2):
                with peak_of(processes) as found:
                    sync_weights(train, serve, "continue", verify_checksums=False, transport=transport)
                used, kept = found.used, found.kept
                told = f"{used / MIB:5.0f} MiB at most ({used / BLOCK:.2f} blocks), {kept / MIB:5.0f} MiB kept"
                print(f"{transport:10} sync {number}: {told}", flush=True)
        used = convert(path)
        print(f"conversion to stored names: {used / MIB:5.1f} MiB at most ({used / BLOCK:.2f} blocks)")
    rlite.shutdown()


if __name__ == "__main__":
    main()
