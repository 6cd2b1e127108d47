"""GRPO written with the engines: every line of the algorithm is here for you to change.

    python examples/grpo_from_engines.py [STEPS]

Its pair, `grpo.py`, is the same run with the ready trainer.
"""

import sys

import torch
from accelerate import init_empty_weights
from transformers import Qwen3ForCausalLM

import rlite
import rlite.nn
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.algorithms import LossInputs, group_advantages, masked_mean, next_token, on_logprobs, ppo_clip
from rlite.assembly.quickstart.run import build_tiny_qwen3
from rlite.rollout import RewardFunction, SingleTurnWorkflow
from rlite.types import GenerationHyperparameters


class Policy(rlite.nn.HuggingFaceFsdp2TrainModule, Qwen3ForCausalLM):
    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)


def digits(prompt, completions, prompt_ids, completion_ids, **row):
    """Share of digits in the completion."""
    return sum(character.isdigit() for character in completions) / max(len(completions), 1)


@on_logprobs
def grpo_loss(tokens, data):
    """Sequences end to end: tokens.logprobs [T] stand where a token is predicted; `next_token` moves data there."""
    keys = ("logprobs", "advantages", "loss_mask")
    old, advantages, mask = (next_token(data[key], data["cu_seqlens"]) for key in keys)
    inputs = LossInputs(tokens.logprobs, old, advantages, mask, cu_seqlens=data["cu_seqlens"])
    return masked_mean(ppo_clip(inputs, clip_low=0.2, clip_high=0.28).loss, mask)


def num_action_tokens(data):
    return next_token(data["loss_mask"], data["cu_seqlens"]).sum()


def main(steps: int) -> None:
    rlite.init(num_devices=1)
    model = str(build_tiny_qwen3("runs/example-grpo-from-engines/model", seed=0))
    rollout = RliteInferenceEngine(model)
    rollout.build()
    with init_empty_weights():
        actor = RliteTrainEngine(Policy.from_pretrained(model))
    actor.build(colocate_with=rollout)

    rows = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(8) for b in range(8)]
    gconfig = GenerationHyperparameters(max_new_tokens=12)
    workflow = SingleTurnWorkflow(RewardFunction(digits), gconfig, rollout.tokenizer)
    for step in range(steps):
        start = step * 8 % len(rows)
        batch = rollout.rollout_batch(rows[start : start + 8], workflow, group_size=8)
        advantages = group_advantages(batch["rewards"].double(), batch["group_ids"])
        batch["advantages"] = advantages.float()[:, None] * batch["loss_mask"]
        stats = actor.train_batch(batch, loss_fn=grpo_loss, loss_weight_fn=num_action_tokens)
        actor.p2p_weight_sync(rollout)
        print(f"step {step}: reward {batch['rewards'].mean():.3f}  loss {stats['loss']:.4f}")
    rlite.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
