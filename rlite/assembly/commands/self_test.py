"""The self-test: a tiny model is made, trained, synced and served, and both engines have to agree about it."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import rlite
from rlite.assembly.commands.doctor import Finding
from rlite.assembly.quickstart.run import build_tiny_qwen3, byte_tokenizer
from rlite.data.sft import sft_rows
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.errors import RliteError
from rlite.trainer.losses import SftLoss
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.rl.objective import OwnLogprobs

LIMIT_S = 60.0
"""seconds for a call of an engine; all of them together take about ten"""
NUM_STEPS, NUM_TOKENS = 3, 8
TOLERANCE = 0.1
"""mean distance of the two engines' log-probabilities; bfloat16 on a GPU stays below"""


def check_engines(executor: str) -> Iterator[Finding]:
    """Yield whether a train step and a generation work."""
    rlite.init(num_devices=1, launcher="inprocess", call_timeout=LIMIT_S)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = build_tiny_qwen3(Path(folder) / "model", seed=0, hidden_size=64)
            started = time.monotonic()
            train, losses = train_steps(model)
            text = f"{NUM_STEPS} steps of a tiny model, loss {losses[0]:.2f} to {losses[-1]:.2f}"
            yield Finding("training", f"{text}, {time.monotonic() - started:.1f} s")
            started = time.monotonic()
            distance = serve(train, model, executor)
            text = f"executor {executor}, {NUM_TOKENS} tokens after a weight sync"
            agree = f"log-probabilities within {distance:.0e} of the trainer's"
            yield Finding("generation", f"{text}, {agree}, {time.monotonic() - started:.1f} s")
    finally:
        rlite.shutdown()


def train_steps(model: Path) -> tuple[RliteTrainEngine, list[float]]:
    """Return a train engine after some steps, and the losses."""
    schedule: Any = {"scheduler": "constant", "warmup_steps": 0, "total_steps": NUM_STEPS}
    engine = RliteTrainEngine(policy_module(model, OptimizerOptions(lr=1e-2, weight_decay=0.0, **schedule)))
    engine.build()
    batch = sft_rows([{"prompt": "2+3=", "response": "5"}] * 4, byte_tokenizer(), 32).batch(range(4))
    losses = [engine.train_batch(batch, loss, loss.weight)["loss"] for loss in [SftLoss()] * NUM_STEPS]
    if not losses[-1] < losses[0]:
        raise RliteError(f"the loss does not fall: {', '.join(f'{loss:.3f}' for loss in losses)}")
    return engine, losses


def serve(train: RliteTrainEngine, model: Path, executor: str) -> float:
    """Return the mean distance of the served model's log-probabilities from the trained model's."""
    served = RliteInferenceEngine(model, executor=executor)
    served.build(colocate_with=train, max_model_len=64, max_num_seqs=2)
    train.p2p_weight_sync(served)
    [output] = served.generate(["2+3="], {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True})
    answer = output.outputs[0]
    ids = torch.tensor([[*output.prompt_token_ids, *answer.token_ids]])
    trained = train.forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, OwnLogprobs())
    distance = (trained[0, -NUM_TOKENS:].float() - torch.tensor(answer.logprobs)).abs().mean().item()
    if not (math.isfinite(distance) and distance < TOLERANCE):
        raise RliteError(f"the served model is not the trained one: log-probabilities differ by {distance:.2g}")
    return distance
