"""Faults planted in the record of a run: log-probabilities as an engine or a trainer with a fault computes them.

They are computed by transformers' own models and attention, with the fault in the model, its inputs or its logits.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlite import config
from rlite.engine.train import RliteTrainEngine
from rlite.services.record.files import TOKENS, path_of
from rlite.services.record.writer import write_table
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import ModelOptions
from rlite.yaml_texts import read_saved

Fault = Callable[[Any, list[int], int], Tensor]
"""model, ids of a sequence, place of the model's first token -> log-probabilities [tokens], at the tokens"""


def logits_of(model: Any, ids: list[int], positions: Tensor | None = None) -> Tensor:
    """Return the logits [tokens, vocabulary] of a sequence."""
    positions = torch.arange(len(ids)) if positions is None else positions
    with torch.no_grad():
        given = {"input_ids": torch.tensor([ids]), "position_ids": positions[None], "use_cache": False}
        # a mask, or transformers would take a jump of positions for the end of a sequence
        return model(**given, attention_mask=torch.ones(1, len(ids), dtype=torch.long)).logits[0].float()


def at_tokens(logits: Tensor, ids: list[int], temperature: float = 1.0) -> Tensor:
    """Return the log-probability of each token, at the token."""
    logprobs = (logits[:-1] / temperature).log_softmax(-1)
    return torch.cat([torch.zeros(1), logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]])


def saved_weights(run: Path, step: int, folder: Path) -> Path:
    """Write the weights of a checkpoint of a run as a model of transformers; it needs a session."""
    saved = read_saved(run / "config.yaml")["actor"]
    own = {name: value for name, value in saved.items() if name in ModelOptions.model_fields}
    options = config.load(ModelOptions, (), given=own)
    engine = RliteTrainEngine(policy_module(options.model_name, options.optimizer_options(1), options.lora))
    engine.build()
    engine.load_state(run / "state" / f"step-{step}")
    engine.save(folder)
    engine.release()
    return folder


def mixed(weights: Path, other: Path, folder: Path, part: str, share: float = 1.0) -> Path:
    """Write a model whose parameters go to those of another model, if their names match a pattern.

    Args:
        weights: the model.
        other: the other model.
        folder: the folder to write.
        part: pattern of the names.
        share: how far they go; 1 is the other model, and below 0 is away from it.
    """
    model, others = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (weights, other))
    values = others.state_dict()
    for name, own in model.state_dict().items():
        if re.search(part, name):
            own.copy_(own.lerp(values[name], share))
    model.save_pretrained(folder)
    return folder


def plant(
    run: Path, folder: Path, weights: Path, fault: Fault, step: int = 3, column: str = "logprobs", **load: Any
) -> Path:
    """Copy a run, and replace a column of its tokens by what a model with a fault computes.

    Args:
        run: the run.
        folder: the copy.
        weights: the model of the faulty side.
        fault: computes the column of each sequence.
        step: the step whose record is changed.
        column: the column.
        load: options of transformers' `from_pretrained`.
    """
    load = {"dtype": torch.float32, "attn_implementation": "eager", **load}
    model = AutoModelForCausalLM.from_pretrained(weights, **load).eval()

    def change(row: Mapping[str, Any]) -> Mapping[str, Any]:
        start = row["mask"].index(True)
        values = fault(model, row["ids"], start)
        return {**row, column: [float(x) if own else 0.0 for x, own in zip(values, row["mask"], strict=True)]}

    return rewrite(run, folder, change, step)


def rewrite(run: Path, folder: Path, change: Callable[[Mapping[str, Any]], Mapping[str, Any]], step: int = 3) -> Path:
    """Copy a run, and change the rows of the tokens of a step."""
    shutil.copytree(run, folder)
    rows = [change(row) for row in pq.read_table(path_of(run, "train", "tokens", step, step)).to_pylist()]
    write_table(folder, "train", step, "tokens", pa.Table.from_pylist(rows, schema=TOKENS))
    return folder
