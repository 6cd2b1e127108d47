"""Train modules and losses that the integration tests share; they travel to workers like a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from rlite import gathered
from rlite.nn import HuggingFaceFsdp2TrainModule


class Policy(HuggingFaceFsdp2TrainModule):
    """AdamW on a language model."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_step(self, rows: list[list[int]]) -> dict[str, float]:
        """One step on rows of equal length."""
        ids = torch.tensor(rows, device=self.device)
        loss = F.cross_entropy(self(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"rows": len(rows), "loss": loss.item()}

    def first_tokens(self, rows: list[list[int]]) -> list[int]:
        return [row[0] for row in rows]

    @gathered("concatenate")
    def all_first_tokens(self, rows: list[list[int]]) -> list[int]:
        return [row[0] for row in rows]

    @gathered("first")
    def is_tied(self) -> bool:
        return self.lm_head.weight is self.model.embed_tokens.weight

    @gathered("first")
    def counter(self, by: int = 0) -> int:
        self.count = getattr(self, "count", 0) + by
        return self.count

    def fill(self, name: str, value: float) -> None:
        with torch.no_grad():
            self.get_parameter(name).fill_(value)

    def scale_weights(self, factor: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(factor)


class Qwen2Policy(Policy, Qwen2ForCausalLM):
    pass


class Qwen3Policy(Policy, Qwen3ForCausalLM):
    pass


class LlamaPolicy(Policy, LlamaForCausalLM):
    pass


class Qwen3MoePolicy(Policy, Qwen3MoeForCausalLM):
    pass


POLICIES = {"qwen2": Qwen2Policy, "qwen3": Qwen3Policy, "llama": LlamaPolicy, "qwen3_moe": Qwen3MoePolicy}


def on_meta(module: type, path: Any) -> Any:
    with init_empty_weights():
        return module.from_pretrained(path)


def make_batch(lengths: Sequence[int], seed: int = 0, vocab_size: int = 256) -> dict[str, Tensor]:
    """Random rows, right-padded; `loss_mask` is one where a row predicts its next token."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(0, vocab_size, (len(lengths), width), generator=generator)
    steps, length = torch.arange(width), torch.tensor(lengths)[:, None]
    return {
        "input_ids": ids * (steps < length),
        "attention_mask": (steps < length).long(),
        "loss_mask": (steps < length - 1).long(),
    }


def token_loss(logits: Tensor, data: dict[str, Any]) -> Tensor:
    """Mean next-token loss over the pack's counted tokens: 0 / 0 where there is none."""
    losses = F.cross_entropy(logits, data["input_ids"].roll(-1), reduction="none")
    return (losses * data["loss_mask"]).sum() / data["loss_mask"].sum()


def num_counted(data: dict[str, Any]) -> Tensor:
    return data["loss_mask"].sum()


def next_token_logprobs(logits: Tensor, data: dict[str, Any]) -> Tensor:
    """[T]: of each token's successor; meaningless at the last of a sequence."""
    return logits.log_softmax(-1).gather(-1, data["input_ids"].roll(-1)[:, None])[:, 0]
