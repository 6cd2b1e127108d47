"""Generation speed: the embedded engine beside left-padded `transformers.generate`, in one process, alternating.

    python benchmarks/generation.py --threads 1

Every prompt has a length and a number of new tokens of its own (end tokens are ignored). `generate` cannot give rows
different lengths: it runs until the longest is done, and what is counted is what was asked for. Both are warmed up,
then measured in turns; the medians and their ratio are printed, with all settings.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from rlite.engine.embedded.options import EmbeddedOptions
from rlite.engine.embedded.worker import EmbeddedWorker
from rlite.types import GenerationHyperparameters, SequenceRequest
from tests.tiny import build_model_dir


@dataclass(frozen=True)
class Job:
    """One prompt and how much is to be made of it."""

    prompt: list[int]
    num_new: int


def make_jobs(num: int, prompt_lengths: tuple[int, int], new_tokens: tuple[int, int]) -> list[Job]:
    """`num` jobs with lengths drawn evenly from the ranges, ends included; always the same ones."""
    rng = random.Random(0)
    return [
        Job([rng.randrange(256) for _ in range(rng.randint(*prompt_lengths))], rng.randint(*new_tokens))
        for _ in range(num)
    ]


def embedded(path: str, jobs: list[Job], max_num_seqs: int) -> Callable[[], int]:
    """Our engine's worker, pumped to the end. The result returns the number of tokens made."""
    longest = max(len(job.prompt) + job.num_new for job in jobs)
    options = EmbeddedOptions(max_model_len=longest, max_num_seqs=max_num_seqs, dtype="float32")
    worker = EmbeddedWorker(path, options, torch.device("cpu"))

    def run() -> int:
        requests = [
            SequenceRequest(
                request_id=i,
                input_ids=job.prompt,
                gconfig=GenerationHyperparameters(max_new_tokens=job.num_new, ignore_eos=True),
                seed=i,
            )
            for i, job in enumerate(jobs)
        ]
        made = sum(len(chunk.token_ids) for chunk in worker.advance(requests, [], 64))
        while worker.num_unfinished:
            made += sum(len(chunk.token_ids) for chunk in worker.advance([], [], 64))
        return made

    return run


def hugging_face(path: str, jobs: list[Job], max_num_seqs: int) -> Callable[[], int]:
    """`generate` on left-padded batches of the same width."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def run() -> int:
        for first in range(0, len(jobs), max_num_seqs):
            batch = jobs[first : first + max_num_seqs]
            width = max(len(job.prompt) for job in batch)
            ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in batch])
            mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
            num_new = max(job.num_new for job in batch)
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                eos_token_id=None,
                pad_token_id=0,
            )
        return sum(job.num_new for job in jobs)

    return run


def seconds(run: Callable[[], int], expected: int) -> float:
    """Wall time of one run, which has to make `expected` tokens."""
    begin = time.perf_counter()
    made = run()
    elapsed = time.perf_counter() - begin
    if made != expected:
        raise RuntimeError(f"{made} tokens were made, {expected} were asked for")
    return elapsed


def main() -> None:
    """Parse, build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local checkpoint; default: a random one of the given shape")
    parser.add_argument("--kind", default="qwen2", choices=["qwen2", "qwen3", "llama"])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--prompt-lengths", type=int, nargs=2, default=(8, 64), metavar=("MIN", "MAX"))
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(32, 256), metavar=("MIN", "MAX"))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    jobs = make_jobs(args.prompts, tuple(args.prompt_lengths), tuple(args.new_tokens))
    total = sum(job.num_new for job in jobs)
    print(f"settings: {vars(args)}")
    print(f"dtype float32, torch {torch.__version__}, transformers {transformers.__version__}, {total} new tokens")
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or str(build_model_dir(Path(folder) / "model", args.kind, True, args.hidden, args.layers))
        runs = {
            "embedded": embedded(path, jobs, args.max_num_seqs),
            "transformers": hugging_face(path, jobs, args.max_num_seqs),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(args.repeats + 1):
            for name, run in runs.items():
                elapsed = seconds(run, total)
                if repeat > 0:
                    times[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        spread = f"{min(times[name]):.2f} to {max(times[name]):.2f}"
        print(f"{name:>14}: {median:6.2f} s ({spread}), {total / median:8.0f} tokens/s")
    for name in runs:
        if name != "embedded":
            print(f"embedded is {medians[name] / medians['embedded']:.2f} times as fast as {name}")


if __name__ == "__main__":
    main()
