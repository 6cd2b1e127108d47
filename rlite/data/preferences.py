"""Preferences: rows of a prompt, a chosen and a rejected response, converted to pairs of token rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlite.data.chat.answers import prompted_answer_encoder
from rlite.data.tokens import TokenRows, tokenise
from rlite.errors import DataError

SIDES = ("chosen", "rejected")


def preference_rows(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    where: str = "data.path",
    **template_options: Any,
) -> TokenRows:
    """Tokenise preference pairs for reward models and DPO.

    `rlite.data.chat.answers.prompted_answer_encoder` has the form of a row. `chosen` and `rejected` are the answers.
    `loss_mask` marks each answer with its end, not the assistant's earlier turns. A row ends as a generated one does,
    so a reward model reads both at the same token. A side longer than `max_length` is cut at its end. If a row
    has a `margin`, all rows have that number.

    Args:
        rows: the table.
        tokenizer: the model's tokenizer.
        max_length: most tokens of one side.
        where: the table's name in messages, such as "data.path=x.json".
        **template_options: options of the chat template, such as `enable_thinking=False`.

    Returns:
        Token rows two by two, chosen before rejected. Batches also have `pair_ids` [N] int64, the same for both sides
            of a pair, `is_chosen` [N] bool, and `margin` [N] float32 if there is one. `tally` counts cut and dropped
            rows (see `tokenise`).

    Raises:
        DataError: a row has another form, or the template refuses a conversation; the message names row and column.
        ConfigError: the tokenizer cannot do this.
    """
    has_margin = any(row.get("margin") is not None for row in rows)
    columns = {"margin": (float, int)} if has_margin else {}
    encode = prompted_answer_encoder(rows, tokenizer, SIDES, columns, where, template_options)
    for number, row in enumerate(rows if has_margin else ()):
        if not math.isfinite(row["margin"]):
            raise DataError(f"{where}, row index {number}: 'margin' is {row['margin']}; expected a finite number")
    pairs = tokenise(len(rows), encode, max_length, where, rows_per_item=len(SIDES))
    per_row = {"pair_ids": np.repeat(np.arange(len(pairs)), 2), "is_chosen": np.tile([True, False], len(pairs))}
    if has_margin:
        margins = [rows[number]["margin"] for number in pairs.source]
        per_row["margin"] = np.repeat(np.asarray(margins, dtype=np.float32), 2)
    return replace(pairs, per_row=per_row)
