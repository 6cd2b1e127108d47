"""Peak memory and time of log-probabilities from hidden states, forward and backward, with and without logits.

    python -m benchmarks.logprobs [--tokens 4096] [--vocab-size 151936] [--width 256] [--device cpu]

Three ways to the same log-probabilities and the gradients of hidden states and output matrix, each in fresh processes,
in turns: `linear_logprobs`, which works in blocks of the vocabulary; `gather_logprobs` on materialised logits, which
keeps no second copy of them; and cross entropy as torch has it. Memory is the peak beyond the inputs: resident on a CPU
(float32), allocated on a GPU (bfloat16, and cross entropy in float32). Ratios are of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from rlite.algorithms import gather_logprobs
from rlite.backends.models.linear import linear
from rlite.nn import linear_logprobs

SIDES = ("ours", "logits", "cross_entropy")
MOST_MEMORY = 0.25
"""share of the memory of materialised logits that ours may take"""


def logprobs(side: str, hidden: Tensor, weight: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
    if side == "ours":
        return linear_logprobs(hidden, weight, labels, **options).logprobs
    if side == "logits":
        return gather_logprobs(linear(hidden, weight), labels)
    return -F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="none")


def peak_bytes(device: str) -> int:
    """The most memory that this process has had so far."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def measure(args: argparse.Namespace) -> dict[str, float]:
    """One side, once, in this process."""
    torch.set_num_threads(args.threads)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    generator = torch.Generator(args.device).manual_seed(0)
    shape = {"device": args.device, "dtype": dtype, "generator": generator}
    hidden = torch.randn(args.tokens, args.width, **shape).requires_grad_()
    weight = (torch.randn(args.vocab_size, args.width, **shape) * 0.02).requires_grad_()
    labels = torch.randint(args.vocab_size, (args.tokens,), device=args.device, generator=generator)
    options = {"block_size": args.block_size, "num_kept": args.num_kept}
    logprobs(args.side, hidden[:64], weight[:512], labels[:64] % 512, options).sum().backward()  # libraries load
    hidden.grad = weight.grad = None
    if args.device == "cpu":
        before = psutil.Process(os.getpid()).memory_info().rss
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    result = logprobs(args.side, hidden, weight, labels, options)
    result.mean().backward()
    if args.device != "cpu":
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    assert hidden.grad is not None
    return {
        "mib": (peak_bytes(args.device) - before) / 2**20,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "mean": result.mean().item(),
        "gradient_norm": hidden.grad.norm().item(),
    }


def in_fresh_process(side: str) -> dict[str, float]:
    """`measure` for a side, with this program's own options."""
    command = [sys.executable, "-m", "benchmarks.logprobs", *sys.argv[1:], "--side", side]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Parse, measure in turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--width", type=int, default=256, help="of the hidden states")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--block-size", type=int, help="as in linear_logprobs; default: its own")
    parser.add_argument("--num-kept", type=int, help="as in linear_logprobs; default: its own")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--side", choices=SIDES, help="measure this side alone, once, in this process")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args)))
        return

    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(args.repeats):
        for side in SIDES:
            runs[side].append(in_fresh_process(side))
    sides = {
        side: {key: statistics.median(run[key] for run in found) for key in found[0]} for side, found in runs.items()
    }
    for key in ("mean", "gradient_norm"):  # they computed the same
        assert abs(sides["ours"][key] / sides["logits"][key] - 1) < 1e-2, sides
    result = {
        "settings": {**vars(args), "torch": torch.__version__},
        **sides,
        "memory_ratio": {side: sides["ours"]["mib"] / sides[side]["mib"] for side in SIDES[1:]},
        "time_ratio": {side: sides["ours"]["seconds"] / sides[side]["seconds"] for side in SIDES[1:]},
        "most_memory_ratio": MOST_MEMORY,
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"settings: {result['settings']}")
    for side, values in sides.items():
        print(f"{side:>13}: {values['mib']:7.0f} MiB, {values['seconds']:6.2f} s")
    for side in SIDES[1:]:
        memory, seconds = result["memory_ratio"][side], result["time_ratio"][side]
        print(f"ours to {side}: memory {memory:.3f} (at most {MOST_MEMORY}), time {seconds:.2f}")


if __name__ == "__main__":
    main()
