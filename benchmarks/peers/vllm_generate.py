"""Generation speed of the real vLLM on CPU, as the other side of `benchmarks/generation.py`.

    make bench-vllm-env                                         # once: .venv-vllm
    .venv-vllm/bin/python benchmarks/peers/vllm_generate.py MODEL_DIR PROMPTS.json --threads 1

Runs in vLLM's own environment and imports nothing of rlite. PROMPTS.json is a list of lists of token ids. The last
line of standard output is one JSON object: the settings, `tokens_per_second` (the median over the repeats, generated
tokens only), the same per second of CPU time, and every repeat. A busy machine disturbs CPU time less than wall time,
but only at one thread: waiting OpenMP threads spin. vLLM is given what suits it: all prompts at once, room in the
cache for all of them, no detokenisation; `--compile` lets it compile the model, which needs a C++ compiler.

With `--serve` it prints its settings as a JSON line, then generates once for each line on standard input, a JSON list
with the number of new tokens for each prompt, and answers with a JSON line: tokens, seconds, CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

CACHE_BYTES = 512 << 20


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--logprobs", action="store_true", help="also return each sampled token's log-probability")
    parser.add_argument("--honour-eos", action="store_true", help="let completions end at the end token")
    parser.add_argument("--max-num-seqs", type=int, help="default: all prompts at once")
    parser.add_argument("--serve", action="store_true", help="generate when asked to on standard input")
    parser.add_argument("--compile", action="store_true", help="without it: enforce_eager")
    args = parser.parse_args()
    if args.serve:
        serve(args)
    else:
        print(json.dumps(measure(args)))


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Settings and figures of `args.repeats` runs after one warm-up run of all prompts."""
    generate, settings = start(args)
    num_new = [args.max_new_tokens] * len(json.loads(args.prompts.read_text()))
    warm_up, *runs = [generate(num_new) for _ in range(1 + args.repeats)]
    return {
        **settings,
        "tokens_per_second": statistics.median(run["tokens"] / run["seconds"] for run in runs),
        "tokens_per_cpu_second": statistics.median(run["tokens"] / run["cpu_seconds"] for run in runs),
        "warm_up_seconds": warm_up["seconds"],
        "runs": runs,
    }


def serve(args: argparse.Namespace) -> None:
    """Answer the lines on standard input."""
    generate, settings = start(args)
    print(json.dumps(settings), flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(json.loads(line))), flush=True)


def start(args: argparse.Namespace) -> tuple[Callable[[list[int]], dict[str, float]], dict[str, object]]:
    """The engine, as a function of every prompt's number of new tokens, and the settings."""
    # vLLM and OpenMP read these at import
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(args.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import torch
    import vllm

    torch.set_num_threads(args.threads)
    prompts = json.loads(args.prompts.read_text())
    max_num_seqs = args.max_num_seqs or len(prompts)
    engine = vllm.LLM(
        model=str(args.model),
        dtype="float32",
        enforce_eager=not args.compile,
        kv_cache_memory_bytes=CACHE_BYTES,
        max_model_len=max(map(len, prompts)) + args.max_new_tokens,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,  # the repeats send the same prompts
        disable_log_stats=True,
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]

    def generate(num_new: list[int]) -> dict[str, float]:
        sampling = [
            vllm.SamplingParams(
                temperature=args.temperature,
                max_tokens=num,
                ignore_eos=not args.honour_eos,
                logprobs=0 if args.logprobs else None,
                detokenize=False,
            )
            for num in num_new
        ]
        start, cpu_start = time.perf_counter(), time.process_time()
        outputs = engine.generate(requests, sampling, use_tqdm=False)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu_seconds}

    return generate, {
        "engine": f"vllm {vllm.__version__}",
        "torch": torch.__version__,
        "model": str(args.model),
        "num_prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_new_tokens": args.max_new_tokens,
        "max_num_seqs": max_num_seqs,
        "temperature": args.temperature,
        "ignore_eos": not args.honour_eos,
        "logprobs": args.logprobs,
        "dtype": "float32",
        "compiled": args.compile,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
