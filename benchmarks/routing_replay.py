"""How often a trainer would choose other experts than the engine, and what replay does for the log-probabilities.

    python -m benchmarks.routing_replay [--steps 20]

A tiny Qwen3-MoE is trained in float32 by GRPO on sums, with rollouts of an engine in bfloat16 and with two updates of
each batch. Printed are, at some steps: the mean and the largest difference of the log-probabilities of trainer and
engine before the updates, without and with replay of the engine's choices; and `moe/replay_differs`, the share of
choices (of a layer for a token) in the updates that the policy would not repeat.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from tensordict import TensorDict

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.routing import ROUTED
from rlite.rollout import SingleTurnWorkflow
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.objective import OwnLogprobs
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from tests.integration.rewards import digits
from tests.mixtures import build_mixture_dir

ROWS = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(10) for b in range(10)]
SAMPLING = SamplingOptions(max_new_tokens=16)


class Compared(PpoTrainer):
    """Notes how far the trainer's log-probabilities are from the engine's, with and without replay."""

    def learn(self, batch: TensorDict) -> TensorDict:
        """Compare before the updates of a batch."""
        actor, mask = self.engines.actor, batch["loss_mask"]
        self.engines.move_to_device(actor)
        differences = []
        for each in (batch.exclude(ROUTED), batch):
            found = actor.forward(each, OwnLogprobs())[mask] - batch["logprobs"][mask]
            differences += [found.abs().mean().item(), found.abs().max().item()]
        _ROWS.append(differences)
        return super().learn(batch)


_ROWS: list[list[float]] = []


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the engine; the trainer computes in float32")
    asked = parser.parse_args()
    rlite.init(num_devices=1, num_threads=1)
    with TemporaryDirectory() as folder:
        model = build_mixture_dir(Path(folder) / "model", "qwen3_moe")
        config = PpoConfig(
            actor=ActorOptions(model_name=str(model), lr=1e-3, update_per_rollout=2, routing_replay="rollout"),
            train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=4),
            rollout=RolloutOptions(
                train_sampling_params=SAMPLING, max_model_len=64, dynamic_filtering=False, dtype=asked.dtype
            ),
            trainer=TrainerOptions(save_dir=f"{folder}/run", total_steps=asked.steps),
        )
        Compared(config, SingleTurnWorkflow(digits, SAMPLING.gconfig(), byte_tokenizer()), ROWS).fit()
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        differs = [row["moe/replay_differs"] for row in lines if "loss" in row]
    rlite.shutdown()
    print("step  mean without, max without  mean with, max with replay  choices that differ")
    for step in sorted({0, asked.steps // 2, asked.steps - 1}):
        off, off_max, on, on_max = _ROWS[step]
        print(f"{step + 1:4}  {off:12.5f}  {off_max:11.5f}  {on:9.5f}  {on_max:15.5f}  {differs[step]:19.1%}")


if __name__ == "__main__":
    main()
