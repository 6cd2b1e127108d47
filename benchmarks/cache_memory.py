"""How many sequences a KV cache of one size serves at once: pages against slots of `max_model_len` tokens.

    python -m benchmarks.cache_memory

The embedded engine serves requests whose lengths are log-normal (sigma 1, mean 256, cut at 2,048), a quarter of each
its prompt, with `max_model_len=2048` and a cache of 64 MiB. After each step the sequences that run are counted, until
no request waits. A cache of slots reserves 2,048 tokens for each sequence, so it serves as many as fit. No two requests
begin alike: with siblings and turns, pages are shared, and more sequences run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.model import build_model
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.types import GenerationHyperparameters, SequenceRequest

MAX_LEN, MEAN, SIGMA = 2048, 256, 1.0


def lengths_of(num: int, seed: int) -> list[int]:
    """Return lengths with a log-normal distribution of this mean, cut at MAX_LEN."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(num).log_normal_(math.log(MEAN) - SIGMA**2 / 2, SIGMA, generator=generator)
    return drawn.clamp(8, MAX_LEN).long().tolist()


def requests_of(num: int, seed: int) -> list[SequenceRequest]:
    """Return requests, each for all tokens up to its length."""
    generator, requests = torch.Generator().manual_seed(seed + 1), []
    for number, length in enumerate(lengths_of(num, seed)):
        prompt = torch.randint(0, 256, (length // 4,), generator=generator).tolist()
        gconfig = GenerationHyperparameters(max_new_tokens=length - len(prompt), ignore_eos=True)
        requests.append(SequenceRequest(request_id=number, input_ids=prompt, gconfig=gconfig, seed=number))
    return requests


def main() -> None:
    """Serve the requests, and print the sequences at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    size = args.mebibytes << 20
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder))
        options = EmbeddedOptions(max_model_len=MAX_LEN, max_num_seqs=args.requests, kv_cache_memory_bytes=size)
        worker = EmbeddedWorker(folder, options, torch.device("cpu"))
    scheduler, running, new = worker._scheduler, list[int](), requests_of(args.requests, args.seed)
    while new or scheduler.waiting:
        worker.advance(new, [], 8)
        running.append(len(scheduler.running))
        new = []
    slots = size // (worker._plan.page_bytes * worker._plan.pages_per_sequence)
    middle = running[len(running) // 10 :]
    found = {
        "slots": slots,
        "pages, mean": statistics.mean(middle),
        "pages, least": min(middle),
        "ratio of means": statistics.mean(middle) / slots,
        "preempted": scheduler.num_preempted,
        "requests": args.requests,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
