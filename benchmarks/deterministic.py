"""Cost of deterministic=true on CPU: generation and a training step with and without it, in one run.

    .venv/bin/python -m benchmarks.deterministic [--threads 1] [--rounds 5]

The model is the one of the other benchmarks: Qwen3, 256 wide, 4 layers, float32. Generation completes 128 prompts of 8
to 64 tokens with 128 tokens each. A training step takes 64 rows of 16 to 512 tokens in packs of at most 2,048, with the
loss of SFT. The two sides alternate in one process. Ratios are of the medians, and of CPU time beside them. At the end,
the log-probabilities that the deterministic engine served are compared with `forward` of the deterministic train
engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import rlite

# rlite before torch: it sets how idle threads wait, which torch reads once
import torch  # isort: skip

from benchmarks.model import build_model
from benchmarks.sft import ROWS_PER_STEP, build_rows, token_rows
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.trainer.losses import SftLoss
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.rl.objective import OwnLogprobs

NEW_TOKENS = 128
SIDES = (False, True)


def serving(path: Path, is_deterministic: bool, others: list[RliteInferenceEngine]) -> RliteInferenceEngine:
    engine = RliteInferenceEngine(path)
    engine.build(
        max_model_len=256,
        max_num_seqs=128,
        dtype="float32",
        deterministic=is_deterministic,
        colocate_with=others,
    )
    return engine


def training(path: Path, is_deterministic: bool, serve: RliteInferenceEngine) -> RliteTrainEngine:
    optimizer = OptimizerOptions(lr=0.0, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=100)
    engine = RliteTrainEngine(policy_module(path, optimizer))
    engine.build(
        tensor_parallel_size=1,
        data_parallel_size=1,
        max_tokens_per_microbatch=2048,
        deterministic=is_deterministic,
        colocate_with=serve,
    )
    engine.train()
    return engine


def generate(engine: RliteInferenceEngine, prompts: list[list[int]]) -> Any:
    return engine.generate(prompts, {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True})


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and CPU seconds."""
    started, cpu_started = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - started, time.process_time() - cpu_started


def alternate(sides: dict[bool, Callable[[], Any]], rounds: int) -> dict[bool, list[tuple[float, float]]]:
    """Seconds and CPU seconds of every round after a warm-up; each side goes first as often."""
    measured: dict[bool, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            seconds = timed(sides[side])
            if number:
                measured[side].append(seconds)
    return measured


def num_unequal(serve: RliteInferenceEngine, train: RliteTrainEngine, prompts: list[list[int]]) -> tuple[int, int]:
    """Generated tokens whose log-probabilities differ in any bit, and all generated tokens."""
    outputs = generate(serve, prompts)
    rows = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    width = max(map(len, rows))
    ids, mask, served = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width).long(), []
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    trained = train.forward({"input_ids": ids, "attention_mask": mask}, OwnLogprobs())
    found = []
    for index, output in enumerate(outputs):
        first = len(output.prompt_token_ids)
        served.append(torch.tensor(output.outputs[0].logprobs))
        found.append(trained[index, first : first + len(served[-1])])
    return int((torch.cat(served) != torch.cat(found)).sum()), sum(map(len, served))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rlite.init(num_devices=1, num_threads=args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        path = build_model(Path(scratch))
        prompts = json.loads((path / "prompts.json").read_text())
        plain = serving(path, False, [])
        serve = {False: plain, True: serving(path, True, [plain])}
        train = {side: training(path, side, plain) for side in SIDES}
        batch = next(token_rows(build_rows(ROWS_PER_STEP)).batches(ROWS_PER_STEP))
        loss = SftLoss()
        tasks: dict[str, dict[bool, Callable[[], Any]]] = {
            "generation": {side: partial(generate, serve[side], prompts) for side in SIDES},
            "forward": {side: partial(train[side].forward, batch, OwnLogprobs()) for side in SIDES},
            "training step": {side: partial(train[side].train_batch, batch, loss, loss.weight) for side in SIDES},
        }
        for name, sides in tasks.items():
            measured = alternate(sides, args.rounds)
            for index, what in enumerate(("seconds", "CPU seconds")):
                free, exact = (statistics.median(times[index] for times in measured[side]) for side in SIDES)
                print(f"{name}, {what}: {free:.3f}, deterministic {exact:.3f}, ratio {exact / free:.2f}")
        unequal, num_tokens = num_unequal(serve[True], train[True], prompts)
        print(f"log-probabilities that differ: {unequal} of {num_tokens}")
    rlite.shutdown()
    print(f"float32, torch {torch.__version__}, {args.threads} thread(s), {args.rounds} rounds")


if __name__ == "__main__":
    main()
