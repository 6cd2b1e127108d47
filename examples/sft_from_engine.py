"""Supervised fine-tuning on chats of your own, through an engine: a module, rows of tokens, a loss, a loop.

    python examples/sft_from_engine.py [STEPS] [MODEL] [CHATS.jsonl]

MODEL is the folder of a Qwen3; for another family derive from its class. Without it a tiny one is made on the spot.
A line of CHATS.jsonl is {"messages": [...]}, and every turn of the assistant is learnt. `rlite sft` is the command for
this.
"""

import random
import sys

import torch
from accelerate import init_empty_weights
from transformers import AutoTokenizer, Qwen3ForCausalLM

import rlite
from rlite.algorithms import masked_mean, next_token, on_logprobs
from rlite.assembly.quickstart.run import build_tiny_qwen3
from rlite.data.readers.tables import read_rows
from rlite.data.sft import sft_rows
from rlite.nn import HuggingFaceFsdp2TrainModule

QUESTION = {"role": "user", "content": "Which colour has the sky?"}
CHATS = [{"messages": [QUESTION, {"role": "assistant", "content": "Blue."}]}] * 32


class Policy(HuggingFaceFsdp2TrainModule, Qwen3ForCausalLM):
    """The model class beside rlite's; methods that you add are methods of the engine."""

    def on_weights_materialized(self):  # in every worker, when its shard of the weights is on the device
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)


@on_logprobs
def cross_entropy(tokens, data):
    """Return the mean over the tokens to learn. `tokens.logprobs` [T] stand where the next token is predicted."""
    return masked_mean(-tokens.logprobs, next_token(data["loss_mask"], data["cu_seqlens"]))


def num_learnt(data):
    """Return the weight of a microbatch's mean."""
    return next_token(data["loss_mask"], data["cu_seqlens"]).sum()


def main(num_steps: int, model: str, chats: list[dict]) -> None:
    rlite.init(num_devices=1)
    rows = sft_rows(chats, AutoTokenizer.from_pretrained(model), max_length=1024)
    with init_empty_weights():
        module = Policy.from_pretrained(model)
    train = rlite.RliteTrainEngine(module)
    train.build()
    for step in range(num_steps):
        batch = rows.batch(random.sample(range(len(rows)), k=min(8, len(rows))))
        stats = train.train_batch(batch, cross_entropy, num_learnt)
        print(f"step {step}: loss {stats['loss']:.3f}, {stats['num_tokens']:.0f} tokens")

    inference = rlite.RliteInferenceEngine(model)
    inference.build(colocate_with=train)
    train.p2p_weight_sync(inference)
    print("answer:", inference.chat([QUESTION], {"temperature": 0.0, "max_new_tokens": 16}).text)
    train.save("runs/example-sft/trained")
    rlite.shutdown()


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    folder = sys.argv[2] if len(sys.argv) > 2 else str(build_tiny_qwen3("runs/example-sft/model", seed=0))
    main(steps, folder, read_rows(sys.argv[3]) if len(sys.argv) > 3 else CHATS)
