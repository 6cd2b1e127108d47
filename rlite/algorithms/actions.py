"""Action tokens side by side: what steps over a sequence's actions, whatever lies between them, steps over columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlite.algorithms.reduce import sequence_index


class ActionTokens(NamedTuple):
    """Where the action tokens are, and their places in a dense table `[sequences, most actions of one]`."""

    tokens_at: Int[Tensor, " actions"]
    rows: Int[Tensor, " actions"]
    columns: Int[Tensor, " actions"]
    num_rows: int
    num_columns: int
    shape: torch.Size

    @classmethod
    def of(cls, mask: Tensor, cu_seqlens: Tensor | None) -> ActionTokens:
        """Those where the mask is 1."""
        index = sequence_index(mask, cu_seqlens).flatten()
        num_rows = mask.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        tokens_at = mask.flatten().bool().nonzero().squeeze(-1)
        tokens_at = tokens_at[index[tokens_at] < num_rows]
        rows = index[tokens_at]
        counts = torch.bincount(rows, minlength=num_rows)
        columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        return cls(tokens_at, rows, columns, num_rows, int(counts.max()) if num_rows else 0, mask.shape)

    def table(self, x: Tensor) -> Float[Tensor, "rows columns"]:
        """Their values side by side in float64, 0 after each sequence's last."""
        dense = torch.zeros(self.num_rows, self.num_columns, dtype=torch.float64, device=x.device)
        dense[self.rows, self.columns] = x.flatten()[self.tokens_at].double()
        return dense

    def tokens(self, table: Float[Tensor, "rows columns"]) -> Float[Tensor, "*tokens"]:
        """A table's values back at their tokens, 0 elsewhere."""
        flat = table.new_zeros(self.shape.numel())
        flat[self.tokens_at] = table[self.rows, self.columns]
        return flat.view(self.shape)


def discounted_suffix_sums(x: Float[Tensor, "rows columns"], factor: float) -> Float[Tensor, "rows columns"]:
    """S_t = x_t + factor S_{t+1}, by doubling: S^{2n}_t = S^n_t + factor^n S^n_{t+n}, so log2(columns) steps."""
    step = 1
    while step < x.shape[1]:
        x = x + torch.nn.functional.pad(x[:, step:], (0, step)) * factor**step
        step *= 2
    return x
