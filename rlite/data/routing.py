"""The experts that each layer of a mixture chose for a token: the form in which they travel beside the token.

An engine returns them as bytes, one string for each token that it read: the numbers of the chosen experts, layer after
layer, one byte each, or two (little-endian) if there are too many experts. A string of ones says that nothing was
recorded: the trainer then chooses itself. A batch holds the same bytes as its key `routed_experts` [N, L, B].

A token's entry among the columns of a response is a list of such strings: those of the tokens that were read since the
entry before. The last string belongs to the position that predicts the token. So the last token of a sequence, which
nobody reads, has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.errors import DataError

ROUTED = "routed_experts"
"""name of the column of a response, and key of a batch"""
MIN_REPEATED = 32
"""tokens from which equal choices for all of them are no coincidence"""


@dataclass(frozen=True)
class RoutingShape:
    """The layers with experts of a model, and how many of its experts each of them chooses for a token."""

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        """Type of a number. In one byte, 255 also stands for no choice: two equal experts are no choice."""
        limit = 256 if self.top_k > 1 else 255
        return torch.uint8 if self.num_experts <= limit else torch.int16

    @property
    def num_bytes(self) -> int:
        """Bytes of a token."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    def encode(self, chosen: Tensor) -> Tensor:
        """Return the bytes [..., B] of choices [..., layers, K], in which -1 is no choice."""
        return chosen.to(self.dtype).flatten(-2).contiguous().view(torch.uint8)

    def decode(self, column: Tensor) -> Tensor:
        """Return the choices [..., layers, K] of bytes [..., B]: expert numbers, or -1 where nothing was recorded."""
        if column.shape[-1] != self.num_bytes or column.dtype != torch.uint8:
            found = f"{column.shape[-1]} bytes ({column.dtype}) for each token"
            expected = f"{self.num_bytes} for {self.num_layers} layers with experts that choose {self.top_k}"
            remedy = f"expected {expected}: layers that predict further tokens do not count"
            raise DataError(f"{ROUTED} has {found}; {remedy}")
        found = column.contiguous().view(self.dtype).unflatten(-1, (self.num_layers, self.top_k)).long()
        none = 255 if self.dtype == torch.uint8 else -1
        return torch.where((found == none).all(-1, keepdim=True), -1, found)


def check_routing(batch: TensorDict, shape: RoutingShape) -> float:
    """Check the experts that an engine has recorded for the tokens of a batch.

    `batch`: has `routed_experts` [N, L, B]. Returns the share of tokens, the last token of each row apart, whose
    experts were recorded.
    """
    mask = batch["attention_mask"].bool()
    chosen = shape.decode(batch[ROUTED][mask])
    recorded = chosen[(chosen >= 0).all(-1).all(-1)]
    told = "the engine's record of chosen experts cannot be true"
    remedy = "its kernels may pass by the record; use actor.routing_replay=old_policy or off"
    if not len(recorded):
        raise DataError(f"{told}: it has none for the {int(mask.sum())} tokens of a batch; {remedy}")
    if (most := int(chosen.max())) >= shape.num_experts or int(chosen.min()) < -1:
        raise DataError(f"{told}: expert {most} of {shape.num_experts}; {remedy}")
    ordered = recorded.sort(-1).values
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise DataError(f"{told}: a token has one expert twice in one layer (zeros in place of a record?); {remedy}")
    if len(recorded) >= MIN_REPEATED and shape.num_experts > shape.top_k and (ordered == ordered[0]).all():
        raise DataError(f"{told}: all {len(recorded)} tokens have the same experts in every layer; {remedy}")
    return len(recorded) / max(int(mask.sum()) - len(mask), 1)


@dataclass(frozen=True)
class RoutingTable:
    """The form of the tables `[tokens, layers, K]` in which vLLM and SGLang return the experts that a model chose."""

    shape: RoutingShape
    layers: tuple[int, ...]
    """numbers of the layers with experts"""
    num_all: int
    """number of the model's layers. A table has all of them, or those with experts alone"""

    def entries(self, table: np.ndarray | None, num: int) -> list[list[bytes]]:
        """Return the entries of some tokens.

        `table`: experts of the tokens that were read since the tokens before; None if the engine has not told them.
        """
        if table is None or not num:
            return [[]] * num
        shape, told = self.shape, f"the engine returned {ROUTED}"
        sizes = {self.num_all: list(self.layers), shape.num_layers: list(range(shape.num_layers))}
        if table.ndim != 3 or table.shape[1] not in sizes or table.shape[2] != shape.top_k or len(table) < num:
            expected = f"at least {num} tokens, {self.num_all} layers (of which {shape.num_layers} have experts) and "
            expected += f"{shape.top_k} experts of each; layers that predict further tokens do not count"
            raise DataError(f"{told} of shape {list(table.shape)}; expected {expected}")
        chosen = torch.from_numpy(table[:, sizes[table.shape[1]]].astype(np.int64))
        if int(chosen.min()) < 0 or int(chosen.max()) >= shape.num_experts:
            raise DataError(f"{told} up to {int(chosen.max())}; expected 0 to {shape.num_experts - 1}")
        rows = [row.tobytes() for row in shape.encode(chosen).numpy()]
        first = len(rows) - num + 1
        return [rows[:first], *([row] for row in rows[first:])]


def note_rows(known: list[bytes], start: int, entries: Sequence[Sequence[bytes]]) -> None:
    """Note what was recorded for the tokens before and of an answer, where nothing is known yet.

    `known`: bytes of each token of the sequence, b"" if there are none.
    """
    for stop, rows in enumerate(entries, start):
        if len(rows) > stop:
            raise DataError(f"{ROUTED} has {len(rows)} entries for the first {stop} tokens of a sequence")
        for position, row in enumerate(rows, stop - len(rows)):
            known[position] = known[position] or row


def rows_tensor(known: Sequence[bytes]) -> Tensor:
    """Return the bytes of a sequence's tokens as a tensor [1, L, B]."""
    widths = {len(row) for row in known if row}
    if len(widths) != 1:
        raise DataError(f"{ROUTED} has tokens of {sorted(widths)} bytes in one sequence; expected one number")
    width = widths.pop()
    whole = b"".join(row or b"\xff" * width for row in known)
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(1, len(known), width)
