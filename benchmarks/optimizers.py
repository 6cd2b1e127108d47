"""Held-out loss of supervised fine-tuning with Muon and with AdamW after the same tokens.

    python -m benchmarks.optimizers [--rates 1e-3 3e-3 1e-2] [--rows 6400]

The task, the model and the data are those of the SFT run of `benchmarks.learning`: a Qwen3 of 0.4 million parameters
imitates a teacher who spells words backwards, from random weights. Held-out rows are of the same teacher. Both
optimizers see the same rows once, in the same order, and fall from the same peak rate to 0. Each one has its best
learning rate of those tried, by the last held-out loss; the last loss of every rate is printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks import learning
from rlite.assembly.quickstart.run import build_tiny_qwen3
from rlite.trainer import sft

OPTIMIZERS = ("adamw", "muon")
NUM_HELD_OUT = 512
Curve = list[tuple[int, float]]
"""tokens so far, and the held-out loss there"""


def run(folder: Path, optimizer: str, rate: float, num_rows: int) -> Curve:
    out = folder / f"{optimizer}-{rate}"
    options = [
        f"actor.model_name={folder}/blank",
        f"actor.optimizer={optimizer}",
        f"actor.lr={rate}",
        "actor.gradient_checkpointing=false",
        *learning.of_rows("sft", folder),
        f"data.path=train[:{num_rows}]@{folder}/sft_train.jsonl",
        f"test_data.path=train[-{NUM_HELD_OUT}:]@{folder}/sft_train.jsonl",
        f"trainer.save_dir={out}",
    ]
    sft.main(options)
    curve, tokens = [], 0
    for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        tokens += int(metrics.get("num_tokens", 0))
        if "test_loss" in metrics:
            curve.append((tokens, metrics["test_loss"]))
    return curve


def report(curves: dict[tuple[str, float], Curve]) -> None:
    best = {}
    for optimizer in OPTIMIZERS:
        tried = {rate: curve for (name, rate), curve in curves.items() if name == optimizer}
        best[optimizer] = min(tried, key=lambda rate: tried[rate][-1][1])
        losses = ", ".join(f"{rate:g}: {curve[-1][1]:.4f}" for rate, curve in tried.items())
        print(f"{optimizer}: last held-out loss by learning rate: {losses}")
    adamw, muon = (curves[name, best[name]] for name in OPTIMIZERS)
    print("tokens, held-out loss of AdamW, of Muon:")
    for (tokens, theirs), (_, ours) in zip(adamw, muon, strict=True):
        print(f"{tokens:8d}  {theirs:.4f}  {ours:.4f}")
    if reached := [tokens for tokens, loss in muon if loss <= adamw[-1][1]]:
        print(f"Muon reached AdamW's last loss after {reached[0] / adamw[-1][0]:.2f} of the tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--rows", type=int, default=6400, help=f"at most {learning.NUM_TRAIN - NUM_HELD_OUT}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        learning.write_data(folder)
        build_tiny_qwen3(folder / "blank", seed=0, hidden_size=128, intermediate_size=256)
        report({(name, rate): run(folder, name, rate, args.rows) for name in OPTIMIZERS for rate in args.rates})


if __name__ == "__main__":
    main()
