"""Cells of a notebook that define a train module, and define it again."""

from __future__ import annotations

import sys
from typing import Any

import pytest

CELL = """
import torch
from rlite import gathered
from rlite.nn import HuggingFaceFsdp2TrainModule
from transformers import LlamaForCausalLM

class Notebook(HuggingFaceFsdp2TrainModule, LlamaForCausalLM):
    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=LR)

    @gathered("first")
    def answer(self):
        return BODY
"""


def run_cell(monkeypatch: pytest.MonkeyPatch, body: str, lr: str = "1e-2", **replaced: str) -> Any:
    """Define `Notebook` in `__main__`, as a cell does, and return the class."""
    source = CELL.replace("BODY", body).replace("LR", lr)
    for old, new in replaced.items():
        source = source.replace(old, new)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    monkeypatch.setattr(sys.modules["__main__"], "Notebook", names["Notebook"], raising=False)
    return names["Notebook"]
