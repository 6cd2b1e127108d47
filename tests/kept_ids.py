"""Tokens that were sampled among kept ids: random batches of them, and their log-probabilities written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlite.algorithms.kept_ids import KeptIds


def kept_sets(labels: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return for each label some token ids, the label among them; [] for every fourth label."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for number, label in enumerate(labels):
        size = int(torch.randint(vocab_size, (), generator=generator))
        others = torch.randperm(vocab_size, generator=generator)[:size].tolist()
        sets.append([] if number % 4 == 3 else [*(id for id in others if id != label), label])
    return sets


def pairs_of(sets: Sequence[Sequence[int]]) -> KeptIds:
    """Return the kept ids of rows."""
    rows = [row for row, ids in enumerate(sets) for _ in ids]
    ids = [id for ids in sets for id in ids]
    return KeptIds.of(torch.tensor(rows, dtype=torch.long), torch.tensor(ids, dtype=torch.long), len(sets))


def written_out(logits: Tensor, labels: Tensor, sets: Sequence[Sequence[int]], temperature: float) -> Tensor:
    """Return log q(label) of each row, with one softmax over the row's kept ids."""
    values = []
    for row, label, ids in zip(logits / temperature, labels.tolist(), sets, strict=True):
        kept = torch.tensor(list(ids) or range(len(row)))
        values.append(row[label] - row[kept].logsumexp(0))
    return torch.stack(values) if values else logits.new_zeros(0)


def kept_columns(batch: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Return `kept_counts` and `kept_ids` for the tokens of a batch, but for the first of each row."""
    lengths = batch["attention_mask"].sum(-1).tolist()
    counts = torch.zeros(batch["input_ids"].shape, dtype=torch.int32)
    rows = []
    for number, length in enumerate(lengths):
        sets = kept_sets(batch["input_ids"][number, 1:length].tolist(), vocab_size, seed=number)
        counts[number, 1:length] = torch.tensor([len(ids) for ids in sets], dtype=torch.int32)
        rows.append(torch.tensor([id for ids in sets for id in ids], dtype=torch.int32))
    return {"kept_counts": counts, "kept_ids": pad_sequence(rows, batch_first=True, padding_value=-1)}


def sets_of_pack(data: Mapping[str, Tensor]) -> list[list[int]]:
    """Return the kept ids of the token after each position of a pack."""
    ids = data["kept_ids"].split(data["kept_counts"].tolist())
    return [part.tolist() for part in (*ids[1:], ids[0])]
