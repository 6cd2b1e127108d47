"""Log-probabilities over the kept ids: the token ids among which a token was drawn.

Truncated sampling (top-p, top-k) draws token a from the policy p, restricted to a set S and normalised again:

    log q(a) = x_a - log sum_{v in S} exp(x_v)        d/dx_v = [v = a] - [v in S] q(v)        x = logits / temperature

Training uses the same S for the old and the new policy. Otherwise the ratio compares other distributions than the one
that was sampled, and the policy gradient is biased ("Keep Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556, section
3.1). The sums are made in float64, so that their order does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class KeptIds:
    """The kept ids of several tokens as pairs (row, id), sorted by id. A row without a pair keeps the vocabulary."""

    rows: Int[Tensor, " pairs"]
    """the row of the logits that predicts the token"""
    ids: Int[Tensor, " pairs"]
    num_rows: int

    @classmethod
    def of(cls, rows: Tensor, ids: Tensor, num_rows: int) -> KeptIds:
        """Return the pairs sorted by id.

        `rows`: the row of each pair, `[pairs]`. `ids`: the token id of each pair, `[pairs]`. No pair occurs twice.
        """
        ids, order = ids.long().sort(stable=True)
        return cls(rows[order], ids, num_rows)

    @classmethod
    def of_pack(cls, data: Mapping[str, Any]) -> KeptIds | None:
        """Return the kept ids of the tokens of a pack, at the positions that predict the tokens.

        `data`: the pack. Without `kept_counts`, nothing was truncated. Returns the kept ids; None if every token was
        drawn from the whole vocabulary.
        """
        if "kept_counts" not in data or not len(data["kept_ids"]):
            return None
        counts = data["kept_counts"].long()
        tokens = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        return cls.of(tokens - 1, data["kept_ids"], len(counts))

    def select(self, chosen: Int[Tensor, " chosen"]) -> KeptIds:
        """Return the kept ids of some rows, renumbered.

        `chosen`: the number of each chosen row, each at most once; -1 is a row that keeps the vocabulary.
        """
        place = self.rows.new_full((self.num_rows + 1,), -1)
        place[chosen] = torch.arange(len(chosen), device=chosen.device)
        place[-1] = -1
        rows = place[self.rows]
        return KeptIds(rows[rows >= 0], self.ids[rows >= 0], len(chosen))

    def is_restricted(self) -> Bool[Tensor, " rows"]:
        """Return the rows that have kept ids."""
        return torch.zeros(self.num_rows, dtype=torch.bool, device=self.rows.device).index_fill(0, self.rows, True)

    def spans(self, bounds: Int[Tensor, " blocks_and_one"]) -> list[tuple[int, int]]:
        """Return for each block of the vocabulary the half-open range of the pairs with an id in it."""
        return list(pairwise(torch.searchsorted(self.ids, bounds.to(self.ids.device)).tolist()))

    def log_sums(self, x: Float[Tensor, " pairs"]) -> Float[Tensor, " rows"]:
        """Return log sum_{v in S} exp(x_v) of each row in float64; meaningless for a row without kept ids."""
        x = x.double()
        greatest = x.new_full((self.num_rows,), torch.finfo(x.dtype).min)
        greatest = greatest.scatter_reduce(0, self.rows, x.detach(), "amax")
        total = torch.zeros_like(greatest).index_add(0, self.rows, (x - greatest[self.rows]).exp())
        return greatest + total.log()


def kept_logprobs(
    logits: Float[Tensor, "rows vocab"],
    labels: Int[Tensor, " rows"],
    temperature: float,
    kept: KeptIds,
    whole: Float[Tensor, " rows"],
) -> Float[Tensor, " rows"]:
    """Return log q(label) of rows with kept ids, and their log-probability in the whole vocabulary of other rows.

    `logits`: `[rows, vocabulary]`. `labels`: token ids, `[rows]`; each is among the kept ids of its row. `whole`:
    log-probabilities in the whole vocabulary, `[rows]`; they give the result its dtype.
    """

    def scaled(x: Tensor) -> Tensor:
        return x.to(whole.dtype) / temperature

    label = scaled(logits.gather(-1, labels.long()[:, None])[:, 0])
    # a row without kept ids has the logarithm of 0, and would have a gradient that is not finite
    is_restricted = kept.is_restricted()
    log_sums = kept.log_sums(scaled(logits[kept.rows, kept.ids]))
    logprobs = label.double() - torch.where(is_restricted, log_sums, 0.0)
    return torch.where(is_restricted, logprobs.to(whole.dtype), whole)
