"""Speed of a mixture of experts beside a dense model, and of a packed hybrid beside its documents one by one.

    .venv/bin/python -m benchmarks.model_kinds [--rounds 21] [--only mixture hybrid]

mixture     Qwen3-MoE with 8 experts of width 384, of which a token chooses 2, beside Qwen3 with MLPs of width 768: the
            same number of parameters for each token, but for the routers. Both are 256 wide and have 4 layers. Work:
            a training step on 64 rows of 16 to 512 tokens, and generation of 32 x 64 tokens.
hybrid      Qwen3.5 (a gated delta net in 3 of 4 layers) and Bamba (Mamba-2 in 3 of 4 layers), 256 wide: a training
            step of the engine, which packs the documents, beside a loop over transformers' own model that reads one
            document after another without padding, with the same linear layers, loss, clipping and AdamW. Work: 16
            documents of 40 to 260 tokens, or 64 documents of 4 to 40 tokens.

Everything is in float32 on one thread. Both sides work in turns in one process, and each goes first as often. Speed is
tokens per second of CPU time, which a busy machine disturbs less than wall time. The ratio is the mean of the rounds'
ratios (of logarithms), with Student's 95 % interval.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import rlite

# rlite before torch: it sets how idle threads wait, which torch reads once
import torch  # isort: skip
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.model import NUM_PRINTABLE, build_prompts
from benchmarks.no_loss import students_t
from benchmarks.sft import ROWS_PER_STEP, build_rows, token_rows
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.models.linear import speed_up_linear_layers
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.trainer.losses import SftLoss
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import ModelOptions

LR, WARM_UP = 1e-4, 2
NUM_PROMPTS, NEW_TOKENS = 32, 64
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384},
    "qwen3_5_text": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "bamba": {
        "attn_layer_indices": [3],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_chunk_size": 64,
    },
}
"""fields of a config beside the common sizes, by model type"""
DOCUMENTS = {"16 of 40 to 260 tokens": (16, 40, 260), "64 of 4 to 40 tokens": (64, 4, 40)}


def build_kind(kind: str, folder: Path) -> Path:
    """Write a random model of a kind, with its tokenizer."""
    tokenizer = byte_tokenizer()
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind], **tokens, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_trainer(folder: Path, **place: Any) -> RliteTrainEngine:
    """Return a train engine in this process; `place` says with which engine it shares the device."""
    options = ModelOptions(
        model_name=str(folder),
        lr=LR,
        weight_decay=0.0,
        scheduler="constant",
        warmup_ratio=0.0,
        gradient_checkpointing=False,
        max_length_per_device=2048,
    )
    engine = RliteTrainEngine(policy_module(folder, options.optimizer_options(1000)))
    engine.build(**options.build_options(1, seed=0), **place)
    engine.train()
    return engine


def build_server(folder: Path, **place: Any) -> RliteInferenceEngine:
    """Return an inference engine in this process; `place` says with which engine it shares the device."""
    engine = RliteInferenceEngine(folder)
    engine.build(max_model_len=128, max_num_seqs=NUM_PROMPTS, dtype="float32", **place)
    return engine


def train_step(engine: RliteTrainEngine, batch: Any) -> float:
    """Make one optimizer step, and return the loss."""
    loss = SftLoss()
    return engine.train_batch(batch, loss, loss.weight)["loss"]


def generate(engine: RliteInferenceEngine, prompts: list[list[int]]) -> None:
    """Generate the same number of tokens for each prompt."""
    engine.generate(prompts, {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True})


class Loop:
    """A loop over transformers' own model that reads one document after another.

    Args:
        folder: folder of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        speed_up_linear_layers(self.model)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step(self, documents: Sequence[torch.Tensor]) -> float:
        """Make one optimizer step on the mean over all tokens that have a predecessor, and return the loss."""
        total, num_labels = 0.0, sum(len(ids) - 1 for ids in documents)
        for ids in documents:
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
            loss = F.cross_entropy(logits[:-1], ids[1:], reduction="sum") / num_labels
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


@dataclass(frozen=True)
class Speed:
    """Tokens per CPU second of two sides, and the ratio of the first to the second with its interval."""

    medians: tuple[float, float]
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        first, second = self.medians
        return f"{first:8.0f} {second:8.0f}   {self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})"


def measured(sides: Sequence[Callable[[], Any]], num_tokens: int, rounds: int) -> Speed:
    """Let two sides work in turns.

    Args:
        sides: do the same work each time they are called.
        num_tokens: tokens of one call.
        rounds: calls of each side that count.
    """
    seconds: list[list[float]] = [[], []]
    for number in range(WARM_UP + rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            started = time.process_time()
            sides[side]()
            seconds[side].append(time.process_time() - started)
    mine, other = (times[WARM_UP:] for times in seconds)
    logs = [math.log(theirs / ours) for ours, theirs in zip(mine, other, strict=True)]
    mean, margin = statistics.mean(logs), students_t(rounds - 1) * statistics.stdev(logs) / math.sqrt(rounds)
    medians = num_tokens / statistics.median(mine), num_tokens / statistics.median(other)
    return Speed(medians, *map(math.exp, (mean, mean - margin, mean + margin)))


def compare_mixture(scratch: Path, rounds: int) -> None:
    """Compare a mixture with a dense model of the same active size."""
    folders = [build_kind(kind, scratch / kind) for kind in ("qwen3_moe", "qwen3")]
    rows = token_rows(build_rows(ROWS_PER_STEP))
    batch = next(iter(rows.batches(ROWS_PER_STEP)))
    trainers = [build_trainer(folders[0])]
    trainers.append(build_trainer(folders[1], colocate_with=trainers[0]))
    sides: list[Callable[[], Any]] = [partial(train_step, trainer, batch) for trainer in trainers]
    print("tokens per CPU second                mixture    dense   ratio (95 % interval)")
    print(f"training step                       {measured(sides, int(rows.lengths.sum()), rounds)}", flush=True)
    prompts = build_prompts(NUM_PROMPTS)
    for trainer in trainers:
        trainer.release()
    servers = [build_server(folders[0])]
    servers.append(build_server(folders[1], colocate_with=servers[0]))
    sides = [partial(generate, server, prompts) for server in servers]
    print(f"generation                          {measured(sides, NUM_PROMPTS * NEW_TOKENS, rounds)}", flush=True)
    for server in servers:
        server.release()


def compare_hybrids(scratch: Path, rounds: int) -> None:
    """Compare packed documents with one document after another."""
    print(
        "tokens per CPU second                 packed     loop   ratio (95 % interval)   difference of the first loss"
    )
    for kind in ("qwen3_5_text", "bamba"):
        folder = build_kind(kind, scratch / kind)
        for told, (count, shortest, longest) in DOCUMENTS.items():
            print(f"{kind:12} {told:22} {hybrid_speed(folder, count, shortest, longest, rounds)}", flush=True)


def hybrid_speed(folder: Path, count: int, shortest: int, longest: int, rounds: int) -> str:
    """Measure one hybrid on one kind of documents."""
    draw = random.Random(0)
    lengths = [draw.randint(shortest, longest) for _ in range(count)]
    documents = [[draw.randrange(NUM_PRINTABLE) for _ in range(length)] for length in lengths]
    batch = next(iter(token_rows(documents).batches(count)))
    engine, loop, tensors = build_trainer(folder), Loop(folder), list(map(torch.tensor, documents))
    difference = abs(train_step(engine, batch) - loop.step(tensors))
    found = measured([partial(train_step, engine, batch), partial(loop.step, tensors)], sum(lengths), rounds)
    engine.release()
    return f"{found}   {difference:.1e}"


COMPARED: Mapping[str, Callable[[Path, int], None]] = {"mixture": compare_mixture, "hybrid": compare_hybrids}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", nargs="+", choices=COMPARED, default=list(COMPARED))
    asked = parser.parse_args()
    rlite.init(num_devices=1, num_threads=1)
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.only:
            COMPARED[name](Path(scratch), asked.rounds)
    rlite.shutdown()
    print(f"float32, torch {torch.__version__}, 1 thread, {asked.rounds} rounds")


if __name__ == "__main__":
    main()
