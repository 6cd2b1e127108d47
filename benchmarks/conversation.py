"""Speed of conversations on CPU: each turn's prompt is the whole conversation so far.

    python -m benchmarks.conversation [--threads 1] [--sessions 64] [--turns 5]

    python -m benchmarks.conversation --vllm-python .venv-vllm/bin/python --vllm-compile

All sessions go on side by side, without waiting for each other between turns. A session begins with a prompt of its
own; each turn generates tokens and appends an observation. vLLM serves the same conversations with its prefix cache, in
a process of its own (`benchmarks/peers/vllm_conversation.py`). Figures are medians of rounds after a warm-up. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import rlite
from benchmarks.model import build_model
from rlite.types import GenerationHyperparameters, LLMRequest

PEER = Path(__file__).parent / "peers" / "vllm_conversation.py"
PROMPT_TOKENS, NEW_TOKENS, OBSERVATION_TOKENS = 256, 64, 16


def draw_tokens(seed: int, length: int) -> list[int]:
    """Ids of printable bytes."""
    rng = random.Random(seed)
    return [rng.randrange(94) for _ in range(length)]


async def converse(engine: rlite.RliteInferenceEngine, session: int, turns: int) -> int:
    """Run one session, and return the number of generated tokens."""
    tokens, made = draw_tokens(session, PROMPT_TOKENS), 0
    gconfig = GenerationHyperparameters(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    for turn in range(turns):
        response = await engine.agenerate(LLMRequest(rid=f"session-{session}", input_ids=tokens, gconfig=gconfig))
        made += len(response.output_tokens)
        tokens = [*tokens, *response.output_tokens, *draw_tokens(session * 1000 + turn, OBSERVATION_TOKENS)]
    return made


async def converse_all(engine: rlite.RliteInferenceEngine, first: int, args: argparse.Namespace) -> int:
    return sum(await asyncio.gather(*(converse(engine, first + i, args.turns) for i in range(args.sessions))))


def ours(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of every round after a warm-up."""
    rlite.init(num_devices=1, num_threads=args.threads)
    engine = rlite.RliteInferenceEngine(model)
    length = PROMPT_TOKENS + args.turns * (NEW_TOKENS + OBSERVATION_TOKENS)
    engine.build(max_model_len=length, max_num_seqs=args.sessions, dtype="float32")
    rates = []
    for number in range(1 + args.rounds):
        begin = time.perf_counter()
        made = asyncio.run(converse_all(engine, number * args.sessions, args))
        rates.append(made / (time.perf_counter() - begin))
    rlite.shutdown()
    return {"tokens_per_second": statistics.median(rates[1:]), "rounds": rates[1:]}


def theirs(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The same of vLLM."""
    command = [args.vllm_python, str(PEER), str(model), "--threads", str(args.threads)]
    command += ["--sessions", str(args.sessions), "--turns", str(args.turns), "--rounds", str(args.rounds)]
    command += ["--compile"] if args.vllm_compile else []
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python")
    parser.add_argument("--vllm-compile", action="store_true", help="its best setting; needs a C++ compiler")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = build_model(Path(scratch) / "model")
        sides = {"rlite": ours(model, args)}
        if args.vllm_python:
            sides["vllm"] = theirs(model, args)
            ratio = sides["rlite"]["tokens_per_second"] / sides["vllm"]["tokens_per_second"]
            print(f"rlite / vllm = {ratio:.2f}")
    print(json.dumps({"settings": vars(args), **sides}))


if __name__ == "__main__":
    main()
