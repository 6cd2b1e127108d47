"""The checkpoints and prompts that both sides of a benchmark use, made from nothing in a second.

    python -m benchmarks.model OUT_DIR [--vocab-size 32768] [--width 512] [--layers 8] [--stop-probability 0.0235]

OUT_DIR becomes an ordinary Hugging Face folder (Qwen3, 256 wide, 4 layers, 4 query and 2 key/value heads of size 64)
with a `prompts.json` beside it: a list of 128 prompts, each a list of 8 to 64 token ids.

A random model almost never ends a completion by itself. With `--stop-probability p` it does so at every position with a
probability of about p, whatever came before: completion lengths are then geometric, as ragged as in real rollouts, and
the same for every framework, because the stopping is in the weights. The mean length under a limit of n tokens is
(1 - (1 - p)^n) / p, which is 40.5 for p = 0.0235 and n = 128.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.tiny import build_model_dir

NUM_PRINTABLE = 94
"""the byte tokenizer's ids 0 to 93 are the characters ! to ~, so that a prompt is the same as ids and as text"""
CONSTANT = 8.0
"""value of channel 0 of the residual stream, at every position of a stopping model"""


def build_model(
    out: Path,
    vocab_size: int | None = None,
    stop_probability: float | None = None,
    width: int = 256,
    layers: int = 4,
) -> Path:
    """Write the benchmark's checkpoint and `prompts.json` to `out`; the same arguments give the same bytes."""
    overrides = {} if vocab_size is None else {"vocab_size": vocab_size}
    tied = stop_probability is None
    build_model_dir(out, "qwen3", tie=tied, hidden=width, layers=layers, initializer_range=0.02, **overrides)
    if stop_probability is not None:
        _make_stopping(out, stop_probability)
    (out / "prompts.json").write_text(json.dumps(build_prompts()))
    return out


def build_prompts(count: int = 128, shortest: int = 8, longest: int = 64, seed: int = 0) -> list[list[int]]:
    """`count` prompts of printable characters with lengths spread evenly over [shortest, longest]."""
    draw = random.Random(seed)
    return [[draw.randrange(NUM_PRINTABLE) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


@torch.no_grad()
def _make_stopping(out: Path, probability: float) -> None:
    """Give the checkpoint's end token the same `probability` everywhere.

    Logits have no bias in these models, so one is made: channel 0 of the residual stream is a constant that no layer
    writes to and only the end token's row of the output matrix reads.
    """
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    end = model.config.eos_token_id
    model.get_input_embeddings().weight[:, 0] = CONSTANT
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    head = model.get_output_embeddings().weight
    head[:, 0] = 0
    tokens = torch.tensor([random.Random(1).choices(range(NUM_PRINTABLE), k=256)])
    channel = model.model(tokens).last_hidden_state[0, :, 0].mean()
    others = model(tokens).logits[0].index_fill(-1, torch.tensor([end]), -math.inf).logsumexp(-1).mean()
    head[end] = 0
    head[end, 0] = (others + math.log(probability / (1 - probability))) / channel
    model.save_pretrained(out)


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab-size", type=int, help="default: the byte tokenizer's 259")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--stop-probability", type=float, help="default: the model hardly ever stops")
    args = parser.parse_args()
    print(build_model(args.out, args.vocab_size, args.stop_probability, args.width, args.layers))


if __name__ == "__main__":
    main()
