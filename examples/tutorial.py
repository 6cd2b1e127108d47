"""The whole of rlite in one page: generate, train with a method of your own, sync, generate again.

    python examples/tutorial.py [MODEL]                          # all CPU cores (Ray), or all GPUs
    torchrun --nproc_per_node=2 examples/tutorial.py [MODEL]     # the same program without Ray

MODEL is the folder of a Qwen3; for another family derive from its class. Without it a tiny one is made on the spot.
"""

import sys
import tempfile

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

import rlite
import rlite.nn
from rlite import NeedParallel, RliteInferenceEngine, RliteTrainEngine
from rlite.assembly.quickstart.run import build_tiny_qwen3

IGNORE = -100


class Policy(rlite.nn.HuggingFaceFsdp2TrainModule, Qwen3ForCausalLM):
    """An ordinary module: what it can do is what the engine can do."""

    def on_weights_materialized(self):  # in every worker, when its shard of the weights is on the device
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_step(self, sequences: list[list[int]], grad_acc_steps: int = 1) -> float:
        rows = [torch.tensor(row, device=self.device) for row in sequences]
        labels = pad_sequence(rows, batch_first=True, padding_value=IGNORE)
        logits = self(labels.clamp(min=0)).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        (loss / grad_acc_steps).backward()  # gradients add up until the optimizer's step
        return loss.item()

    def optimizer_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def main(model: str) -> None:
    rlite.init()

    # An inference engine serves the checkpoint on all devices.
    inference = RliteInferenceEngine(model, executor="torch")
    inference.build()
    prompts = ["Hello, world!", "Once upon a time"] * 8
    rollouts = inference.generate(prompts, sampling_params={"temperature": 1.0, "max_tokens": 24})
    inference.meta()  # gives all its memory back

    # A train engine shards the module over the same devices. On meta it weighs nothing, wherever it travels.
    with init_empty_weights():
        module = Policy.from_pretrained(model)
    train = RliteTrainEngine(module, executor="fsdp2")
    train.build(tensor_parallel_size=len(rlite.current_session().devices), colocate_with=inference)

    # Your methods, called on every rank. NeedParallel is split, other arguments are copied, and the results come back
    # as a list. Each step of the optimizer takes the gradients of two batches.
    sequences = [[*rollout.prompt_token_ids, *rollout.outputs[0].token_ids] for rollout in rollouts]
    batches = [sequences[0::2], sequences[1::2]]
    for step in range(4):
        losses = []
        for batch in batches:
            losses += train.train_step(NeedParallel(batch), grad_acc_steps=len(batches))
        train.optimizer_step()
        print(f"step {step}: loss {sum(losses) / len(losses):.3f}")

    # Memory for the served weights, the weights themselves, then memory for generation.
    inference.cuda("weights")
    print(train.p2p_weight_sync(inference))
    train.cpu()
    inference.cuda("kv_cache")
    print(inference.generate(prompts[:1], sampling_params={"temperature": 0.0, "max_tokens": 24})[0].outputs[0])
    rlite.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else str(build_tiny_qwen3(folder, seed=0)))
