"""Speed of conversations on CPU: each turn's prompt is the whole conversation so far.

    python -m benchmarks.conversation [--threads 1] [--sessions 64] [--turns 5]

    python -m benchmarks.conversation --vllm-python .venv-vllm/bin/python --vllm-compile

All sessions go on side by side, without waiting for each other between turns. A session begins with a prompt of its
own; each turn generates tokens and appends an observation. vLLM serves the same conversations with its prefix cache, in
a process of its own (`benchmarks/peers/vllm_conversation.py`). The sides take turns. Figures are medians of rounds
after a warm-up; the ratio is the median of the rounds' ratios. The last line is one JSON object.
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
from collections.abc import Mapping
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


class Ours:
    """rlite's engine in this process."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        rlite.init(num_devices=1, num_threads=args.threads)
        self._args = args
        self._engine = rlite.RliteInferenceEngine(model)
        length = PROMPT_TOKENS + args.turns * (NEW_TOKENS + OBSERVATION_TOKENS)
        self._engine.build(max_model_len=length, max_num_seqs=args.sessions, dtype="float32")

    def rate(self, first: int) -> float:
        """Tokens per second of one round."""
        begin = time.perf_counter()
        made = asyncio.run(converse_all(self._engine, first, self._args))
        return made / (time.perf_counter() - begin)

    def close(self) -> None:
        rlite.shutdown()


class Vllm:
    """vLLM in a process of its own, with its own settings of OpenMP."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        command = [args.vllm_python, str(PEER), str(model), "--threads", str(args.threads)]
        command += ["--sessions", str(args.sessions), "--turns", str(args.turns)]
        command += ["--compile"] if args.vllm_compile else []
        env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.settings = self._answer()

    def rate(self, first: int) -> float:
        """Tokens per second of one round."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{first}\n")
        self._process.stdin.flush()
        return float(self._answer()["tokens_per_second"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # others are vLLM's messages
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"vLLM ended with exit code {self._process.wait()}")


def compare(sides: Mapping[str, Ours | Vllm], args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each side, in turns, after a warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(1 + args.rounds):
        for name, side in sides.items():
            rates[name].append(side.rate(number * args.sessions))
    return {name: found[1:] for name, found in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm-python")
    parser.add_argument("--vllm-compile", action="store_true", help="its best setting; needs a C++ compiler")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = build_model(Path(scratch) / "model")
        sides: dict[str, Ours | Vllm] = {"rlite": Ours(model, args)}
        settings = vars(args)
        if args.vllm_python:
            sides["vllm"] = vllm = Vllm(model, args)
            settings |= vllm.settings
        rates = compare(sides, args)
        for side in sides.values():
            side.close()
    for name, found in rates.items():
        ratio = statistics.median(own / other for own, other in zip(rates["rlite"], found, strict=True))
        print(f"{name:<8}{statistics.median(found):>8.0f} tokens/s   rlite is {ratio:.2f} x")
    print(json.dumps({"settings": settings, "rounds": rates}))


if __name__ == "__main__":
    main()
