"""Cost of a verified weight sync beside a plain one, as a share of a GRPO step. The exit status is 1 above the limit.

    .venv/bin/python -m benchmarks.verified_sync [--steps 12] [--threads 1]

The steps are those of `benchmarks.grpo`: 8 prompts x 8 generations of up to 128 tokens. After the update of each step,
the weights are synced plainly and verified, in changing order. A verified sync hashes every tensor at both ends, and
evaluates the probe. The cost is the difference of the medians. `rollout.verify_sync=N` pays it in every Nth step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import rlite
from benchmarks.grpo import STOP_PROBABILITY, grpo_trainer
from benchmarks.model import build_model
from rlite.services.console.probe import PROBE

EVERY = 20
"""the N of docs/verified-sync.md"""
LIMIT = 0.01
"""share of the steps that verification may take at this N"""


def seconds(act: Callable[[], object]) -> float:
    """Return the wall time of an action."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measured(model: Path, scratch: Path, num_steps: int) -> dict[str, list[float]]:
    """Return the seconds of whole steps, and of both kinds of syncs after them."""
    trainer = grpo_trainer(model, scratch, num_steps + 1, record="none")
    trainer.start()
    actor, rollout = trainer.engines.actor, trainer.engines.rollout

    def step() -> None:
        trainer.update(trainer.with_advantages(trainer.rollouts.next_batch()))
        trainer.sync()

    def verified() -> None:
        actor.p2p_weight_sync(rollout, verify_checksums=True)
        rollout.prompt_logprobs([PROBE])

    acts = {"plain sync": lambda: actor.p2p_weight_sync(rollout), "verified sync": verified}
    found: dict[str, list[float]] = {"step": [], **{name: [] for name in acts}}
    for number in range(num_steps + 1):
        found["step"].append(seconds(step))
        for name in sorted(acts, reverse=bool(number % 2)):
            found[name].append(seconds(acts[name]))
        rollout.set_version(trainer.run.step + 1)  # one sync of each step counts
        trainer.run.step += 1
    return {name: values[1:] for name, values in found.items()}


def main() -> None:
    """Print the medians, and the share of the steps at several N."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder) / "model", stop_probability=STOP_PROBABILITY)
        rlite.init(num_devices=1, num_threads=args.threads)
        found = measured(model, Path(folder) / "run", args.steps)
        num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        rlite.shutdown()
    medians = {name: statistics.median(values) for name, values in found.items()}
    cost = medians["verified sync"] - medians["plain sync"]
    for name, values in found.items():
        print(f"{name:13} {medians[name]:.4f} s (from {min(values):.4f} to {max(values):.4f}, {len(values)} times)")
    shares = {every: cost / (every * medians["step"]) for every in (1, 5, EVERY, 100)}
    print(f"{cost:.4f} s for {num_bytes / 2**20:.0f} MiB; of the steps:", end=" ")
    print(", ".join(f"{share:.2%} at verify_sync={every}" for every, share in shares.items()))
    print(f"torch {torch.__version__}, {args.threads} thread(s); limit {LIMIT:.0%} at verify_sync={EVERY}")
    if shares[EVERY] > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
