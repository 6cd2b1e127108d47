"""Labelled answers: rows of a prompt, an answer and whether it is desirable, converted to token rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rlite.data.chat.answers import prompted_answer_encoder
from rlite.data.tokens import TokenRows, tokenise

ANSWER = "completion"


def labelled_rows(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    where: str = "data.path",
    **template_options: Any,
) -> TokenRows:
    """Tokenise labelled answers for KTO.

    `rlite.data.chat.answers.prompted_answer_encoder` has the form of a row. `completion` is the answer, and `label` is
    true if it is desirable. `loss_mask` marks the answer with its end, which is the end of the row. A row longer than
    `max_length` is cut at its end.

    Args:
        rows: the table.
        tokenizer: the model's tokenizer.
        max_length: most tokens of a row.
        where: the table's name in messages, such as "data.path=x.json".
        **template_options: options of the chat template, such as `enable_thinking=False`.

    Returns:
        One token row per kept row. Batches also have `is_desirable` [N] bool. `tally` counts cut and dropped rows (see
            `tokenise`).

    Raises:
        DataError: a row has another form, or the template refuses a conversation; the message names row and column.
        ConfigError: the tokenizer cannot do this.
    """
    encode = prompted_answer_encoder(rows, tokenizer, [ANSWER], {"label": bool}, where, template_options)
    tokens = tokenise(len(rows), encode, max_length, where)
    labels = [rows[number]["label"] for number in tokens.source]
    return replace(tokens, per_row={"is_desirable": np.asarray(labels, dtype=bool)})


def mismatched(batch: TensorDict, max_length: int) -> TensorDict | None:
    """Return a batch of each prompt with the answer to another prompt of the batch.

    If all prompts differ, prompt i has the answer of row i + 1, and the last prompt the answer of row 0. If some are
    equal, their rows are taken one after another, and the answers are shifted by the rows of the most frequent prompt.
    The result depends only on the rows and their order.

    Args:
        batch: a right-padded batch. A row's answer begins with the first token of its `loss_mask` and ends the row.
        max_length: most tokens of a row; a longer one is cut at its end.

    Returns:
        A batch with `input_ids`, `attention_mask` and `loss_mask` [M, L]. It has no row for a prompt that would get an
            answer to the same prompt; None if that leaves no row.
    """
    lengths, starts = batch["attention_mask"].sum(-1).tolist(), batch["loss_mask"].int().argmax(-1).tolist()
    prompts = [ids[:start] for ids, start in zip(batch["input_ids"], starts, strict=True)]
    answers = [ids[a:b] for ids, a, b in zip(batch["input_ids"], starts, lengths, strict=True)]
    masks = [mask[a:b] for mask, a, b in zip(batch["loss_mask"], starts, lengths, strict=True)]
    rows = [
        (
            torch.cat([prompts[row], answers[other]])[:max_length],
            torch.cat([torch.zeros(starts[row], dtype=torch.bool), masks[other]])[:max_length],
        )
        for row, other in _partners([tuple(prompt.tolist()) for prompt in prompts])
    ]
    if not rows:
        return None
    columns: dict[str, Tensor] = {
        "input_ids": pad_sequence([ids for ids, _ in rows], batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(mask) for _, mask in rows], batch_first=True),
        "loss_mask": pad_sequence([mask for _, mask in rows], batch_first=True),
    }
    return TensorDict(columns, batch_size=[len(rows)])


def longest_mismatch(rows: TokenRows) -> int:
    """Return the most tokens that a prompt has with the answer of any row.

    Args:
        rows: the table.
    """
    learnt = np.flatnonzero(rows.loss_mask)
    prompts = learnt[np.searchsorted(learnt, rows.starts[:-1])] - rows.starts[:-1]
    return int(prompts.max() + (rows.lengths - prompts).max())


def _partners(prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Return pairs of rows with different prompts, in which no row is first or second twice."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    order = [row for group in groups.values() for row in group]
    shift = max(map(len, groups.values()))
    shifted = order[shift:] + order[:shift]
    return [(row, other) for row, other in zip(order, shifted, strict=True) if prompts[row] != prompts[other]]
