"""Speculation from siblings and earlier text on CPU: accepted tokens of each check, and CPU time with and without it.

    .venv/bin/python -m benchmarks.speculation [--warm-steps 150] [--rounds 5]

Two tasks, each with the quickstart's model (Qwen3, 128 wide, 2 layers) after imitation of correct answers:
`quickstart` spells words backwards, `repeat` says a word six times. Samples are drawn at temperature 1, eight of each
prompt, with one prompt or four at a time. `alone` draws one sample at a time. Each side serves the same requests with
the same seeds, the sides alternate, and tokens are compared. Ratios are medians over the rounds.
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

TIMES = 6
"""words of an answer in the task `repeat`"""
Mode = Literal["auto"] | bool


def repeated(row: dict[str, Any]) -> dict[str, Any]:
    """Return a problem whose answer is a short word, several times."""
    word = row["metadata"]["word"][:4]
    turn = {"role": "user", "content": f"repeat {word}"}
    return {**row, "messages": [turn], "answer": " ".join([word] * TIMES)}


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


def requests_of(prompts: list[list[int]], num_samples: int, new_tokens: int) -> list[SequenceRequest]:
    gconfig = GenerationHyperparameters(max_new_tokens=new_tokens)
    samples = [prompt for prompt in prompts for _ in range(num_samples)]
    return [SequenceRequest(request_id=i, input_ids=ids, gconfig=gconfig, seed=i) for i, ids in enumerate(samples)]


def served(path: Path, mode: Mode, batches: list[list[SequenceRequest]]) -> tuple[float, list[list[int]], Any]:
    """CPU seconds, tokens, and the worker's counts."""
    options = EmbeddedOptions(max_model_len=256, max_num_seqs=32, dtype="float32", speculation=mode)
    worker = EmbeddedWorker(str(path), options, torch.device("cpu"))
    begin, texts = time.process_time(), []
    for batch in batches:
        chunks = sorted(worker.advance(batch, [], 10_000), key=lambda chunk: chunk.request_id)
        texts += [chunk.token_ids for chunk in chunks]
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
    """Train both models, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts of each task")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rlite.init(num_devices=1, num_threads=1)
    with tempfile.TemporaryDirectory() as scratch:
        train, held_out = problems(QuickstartConfig(folder=scratch), Path(scratch))
        tasks = {
            "quickstart": (train, held_out, 12),
            "repeat": ([*map(repeated, train)], [*map(repeated, held_out)], 64),
        }
        for name, (rows, asked, new_tokens) in tasks.items():
            path = trained(Path(scratch) / name, rows, args.warm_steps)
            tokenizer = load_tokenizer(path)
            prompts = [
                tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
                for row in asked[: args.prompts]
            ]
            kinds = {
                "alone": [requests_of([prompt], 1, new_tokens) for prompt in prompts],
                "1 prompt x 8": [requests_of([prompt], 8, new_tokens) for prompt in prompts],
                "4 prompts x 8": [requests_of(prompts[i : i + 4], 8, new_tokens) for i in range(0, len(prompts), 4)],
            }
            for kind, batches in kinds.items():
                report(f"{name} {kind}", path, batches, args.rounds)
    rlite.shutdown()


if __name__ == "__main__":
    main()
