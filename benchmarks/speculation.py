"""Speculation from siblings and earlier text on CPU: accepted tokens of each check, and CPU time with and without it.

    .venv/bin/python -m benchmarks.speculation [--warm-steps 150] [--rounds 5]

Two tasks. `quickstart`: the quickstart's model (Qwen3, 128 wide, 2 layers) spells words backwards after imitation of
correct answers; samples at temperature 1, eight of each prompt, with one prompt or four at a time, or one sample alone.
`repetitive`: the model of the other benchmarks (Qwen3, 256 wide, 4 layers) continues prompts greedily and soon repeats
itself. Each side serves the same requests with the same seeds in calls of 8 steps, the sides alternate, and tokens are
compared. Ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import rlite

# rlite before torch: it sets how idle threads wait, which torch reads once
import torch  # isort: skip

from benchmarks.model import build_model, build_prompts
from rlite.assembly.commands.options import QuickstartConfig
from rlite.assembly.quickstart.run import MAX_LENGTH, build_tiny_qwen3, problems
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.data.prompts import ShuffledOrder
from rlite.data.sft import sft_rows
from rlite.engine.train import RliteTrainEngine
from rlite.nn.pretrained import load_tokenizer
from rlite.trainer.losses import SftLoss
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.types import GenerationHyperparameters, SequenceRequest

STEPS = 8
"""decode steps of a call, as the engine makes them"""
Mode = Literal["auto"] | bool


def trained(folder: Path, rows: list[Any], num_steps: int) -> Path:
    """Write a model that has imitated the answers of a task."""
    blank = build_tiny_qwen3(folder / "blank", seed=0, hidden_size=128, intermediate_size=256)
    chats = [{"messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]} for row in rows]
    data = sft_rows(chats, load_tokenizer(blank), MAX_LENGTH)
    optimizer = OptimizerOptions(lr=2e-3, weight_decay=0.0, scheduler="cosine", warmup_steps=10, total_steps=num_steps)
    engine, order, loss = RliteTrainEngine(policy_module(blank, optimizer)), ShuffledOrder(len(data), 0), SftLoss()
    engine.build()
    for _ in range(num_steps):
        engine.train_batch(data.batch(order.take(64)), loss, loss.weight)
        engine.step_lr_scheduler()
    engine.save(folder / "warm")
    engine.release()
    return folder / "warm"


def requests_of(prompts: list[list[int]], num_samples: int, **gconfig: Any) -> list[SequenceRequest]:
    hyperparameters = GenerationHyperparameters(**gconfig)
    samples = [prompt for prompt in prompts for _ in range(num_samples)]
    return [
        SequenceRequest(request_id=i, input_ids=ids, gconfig=hyperparameters, seed=i) for i, ids in enumerate(samples)
    ]


def served(path: Path, mode: Mode, batches: list[list[SequenceRequest]]) -> tuple[float, list[list[int]], Any]:
    """CPU seconds, tokens, and the worker's counts."""
    options = EmbeddedOptions(max_model_len=256, max_num_seqs=32, dtype="float32", speculation=mode)
    worker = EmbeddedWorker(str(path), options, torch.device("cpu"))
    begin, texts = time.process_time(), []
    for batch in batches:
        made: list[list[int]] = [[] for _ in batch]
        chunks = worker.advance(batch, [], STEPS)
        while chunks:
            for chunk in chunks:
                made[chunk.request_id] += chunk.token_ids
            chunks = worker.advance([], [], STEPS)
        texts += made
    return time.process_time() - begin, texts, worker.speculator


def report(name: str, path: Path, batches: list[list[SequenceRequest]], rounds: int) -> None:
    """Print the counts of each mode, and the CPU time without speculation in units of its own."""
    modes: tuple[Mode, ...] = (False, "auto", True)
    ratios: dict[Mode, list[float]] = {mode: [] for mode in modes}
    for number in range(rounds + 1):
        found = {mode: served(path, mode, batches) for mode in modes}
        for mode in modes:
            if number:
                ratios[mode].append(found[False][0] / found[mode][0])
    for mode in modes[1:]:
        _, texts, counts = found[mode]
        differing = sum(a != b for a, b in zip(texts, found[False][1], strict=True))
        checks, accepted = counts.num_checks, counts.num_accepted
        share, ratio = accepted / max(1, counts.num_proposed), statistics.median(ratios[mode])
        print(
            f"{name:<22}{mode!s:<6}{sum(map(len, texts)):>7} tokens, {checks:>5} checks, accepted {share:>5.0%} of the "
            f"proposed, {accepted / max(1, checks):>5.2f} a check; CPU time without / with {ratio:.2f}; "
            f"{differing} of {len(texts)} texts differ"
        )


def main() -> None:
    """Build both models, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts of the quickstart")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rlite.init(num_devices=1, num_threads=1)
    with tempfile.TemporaryDirectory() as scratch:
        train, held_out = problems(QuickstartConfig(folder=scratch), Path(scratch))
        path = trained(Path(scratch), train, args.warm_steps)
        tokenizer = load_tokenizer(path)
        prompts = [
            tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
            for row in held_out[: args.prompts]
        ]
        some, fours = {"max_new_tokens": 12}, [prompts[i : i + 4] for i in range(0, len(prompts), 4)]
        report("quickstart, alone", path, [requests_of([p], 1, **some) for p in prompts], args.rounds)
        report("quickstart, 1 x 8", path, [requests_of([p], 8, **some) for p in prompts], args.rounds)
        report("quickstart, 4 x 8", path, [requests_of(four, 8, **some) for four in fours], args.rounds)
        path = build_model(Path(scratch) / "benchmark")
        greedy = {"max_new_tokens": 96, "temperature": 0, "ignore_eos": True}
        for num in (1, 4, 8, 32):
            batch = requests_of(build_prompts(num, 32, 32), 1, **greedy)
            report(f"repetitive, {num} rows", path, [batch], args.rounds)
    rlite.shutdown()


if __name__ == "__main__":
    main()
