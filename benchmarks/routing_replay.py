"""How often a trainer would choose other experts than the engine, and what replay does for the log-probabilities.

    python -m benchmarks.routing_replay [--steps 20]

A tiny Qwen3-MoE is trained in float32 by GRPO on sums, with rollouts of an engine in bfloat16 and with two updates of
each batch. Printed are, at some steps: `logprob_drift`, the mean difference of the log-probabilities of trainer and
engine, without and with replay; and `moe/replay_differs`, the share of choices (of a layer for a token) in the updates
that the policy would not repeat.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.rollout import SingleTurnWorkflow
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from tests.integration.rewards import digits
from tests.mixtures import build_mixture_dir

ROWS = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(10) for b in range(10)]
SAMPLING = SamplingOptions(max_new_tokens=16)


def curve(model: Path, folder: Path, steps: int, replay: Any) -> list[dict[str, float]]:
    """Return the metrics of the steps of one run."""
    config = PpoConfig(
        actor=ActorOptions(model_name=str(model), lr=1e-3, update_per_rollout=2, routing_replay=replay),
        train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=4),
        rollout=RolloutOptions(
            train_sampling_params=SAMPLING, max_model_len=64, dynamic_filtering=False, dtype="bfloat16"
        ),
        trainer=TrainerOptions(save_dir=str(folder), total_steps=steps),
    )
    PpoTrainer(config, SingleTurnWorkflow(digits, SAMPLING.gconfig(), byte_tokenizer()), ROWS).fit()
    rlite.shutdown()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    runs = {}
    with TemporaryDirectory() as folder:
        model = build_mixture_dir(Path(folder) / "model", "qwen3_moe")
        for replay in ("off", "rollout"):
            rlite.init(num_devices=1, num_threads=1)
            runs[replay] = curve(model, Path(folder) / replay, steps, replay)
    print("step  drift without replay  drift with replay  choices that differ")
    for step in sorted({0, steps // 2, steps - 1}):
        off, on = runs["off"][step], runs["rollout"][step]
        drifts = f"{off['logprob_drift']:20.4f}  {on['logprob_drift']:17.4f}"
        print(f"{step + 1:4}  {drifts}  {on['moe/replay_differs']:19.1%}")


if __name__ == "__main__":
    main()
