"""Conversations served by vLLM on CPU with its prefix cache, as the other side of `benchmarks/conversation.py`.

    .venv-vllm/bin/python benchmarks/peers/vllm_conversation.py MODEL_DIR --threads 1

Runs in vLLM's own environment and imports nothing of rlite. JSON objects on standard output are the settings and,
for each number of a round's first session on standard input, the tokens per second of the round. vLLM is given what
suits it: its engine in this process, stepped without an event loop, room in the cache for all sessions, no
detokenisation; `--compile` lets it compile the model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

PROMPT_TOKENS, NEW_TOKENS, OBSERVATION_TOKENS = 256, 64, 16


def draw_tokens(seed: int, length: int) -> list[int]:
    """Ids of printable bytes."""
    rng = random.Random(seed)
    return [rng.randrange(94) for _ in range(length)]


def main() -> None:
    """Parse, start, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="without it: enforce_eager")
    args = parser.parse_args()
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
    engine = vllm.LLM(
        model=str(args.model),
        dtype="float32",
        enforce_eager=not args.compile,
        kv_cache_memory_bytes=2 << 30,
        max_model_len=PROMPT_TOKENS + args.turns * (NEW_TOKENS + OBSERVATION_TOKENS),
        max_num_seqs=args.sessions,
        enable_prefix_caching=True,
        disable_log_stats=True,
    ).llm_engine
    sampling = vllm.SamplingParams(
        temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False
    )

    def converse_all(first: int) -> int:
        tokens = {str(first + i): draw_tokens(first + i, PROMPT_TOKENS) for i in range(args.sessions)}
        made = 0
        for name, ids in tokens.items():
            engine.add_request(f"{name}/0", {"prompt_token_ids": ids}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                name, turn = output.request_id.split("/")[:2]
                new = list(output.outputs[0].token_ids)
                made += len(new)
                tokens[name] += [*new, *draw_tokens(int(name) * 1000 + int(turn), OBSERVATION_TOKENS)]
                if int(turn) + 1 < args.turns:
                    prompt = {"prompt_token_ids": list(tokens[name])}
                    engine.add_request(f"{name}/{int(turn) + 1}", prompt, sampling)
        return made

    print(json.dumps({"engine": f"vllm {vllm.__version__}", "compiled": args.compile}), flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        made = converse_all(int(line))
        print(json.dumps({"tokens_per_second": made / (time.perf_counter() - begin)}), flush=True)


if __name__ == "__main__":
    main()
