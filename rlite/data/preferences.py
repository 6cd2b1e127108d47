"""Preferences: rows of a prompt, a chosen and a rejected response, converted to pairs of token rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlite.data.chat.answers import chat_answer_encoder, check_prompt
from rlite.data.chat.masks import ChatEncoder
from rlite.data.chat.raw import answer_encoder
from rlite.data.tables import check_columns
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

    All rows have the form of the first row: a text `prompt`, or `messages` that end before the assistant's answer.
    `chosen` and `rejected` are texts. `loss_mask` marks each answer with its end (raw: the end-of-sequence token), not
    the assistant's earlier turns. Text that a template writes after that end is removed, so a row ends as a generated
    one does, and a reward model reads both at the same token. A side longer than `max_length` is cut at its end. If the
    first row has a `margin`, all rows have that number.

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
    is_chat = bool(rows) and rows[0].get("messages") is not None
    has_margin = bool(rows) and rows[0].get("margin") is not None
    for number, row in enumerate(rows):
        _check(row, is_chat, has_margin, f"{where}, row index {number}")
    if is_chat:
        encode = chat_answer_encoder(ChatEncoder(tokenizer, **template_options), rows, SIDES, where)
    else:
        encode = answer_encoder(tokenizer, rows, SIDES)
    pairs = tokenise(len(rows), encode, max_length, where, rows_per_item=len(SIDES))
    per_row = {"pair_ids": np.repeat(np.arange(len(pairs)), 2), "is_chosen": np.tile([True, False], len(pairs))}
    if has_margin:
        margins = [rows[number]["margin"] for number in pairs.source]
        per_row["margin"] = np.repeat(np.asarray(margins, dtype=np.float32), 2)
    return replace(pairs, per_row=per_row)


def _check(row: Mapping[str, Any], is_chat: bool, has_margin: bool, where: str) -> None:
    columns: dict[str, type | tuple[type, ...]] = {"chosen": str, "rejected": str}
    if has_margin:
        columns["margin"] = (float, int)
    check_columns(row, {"messages": list, **columns} if is_chat else {"prompt": str, **columns}, where)
    if has_margin and not math.isfinite(row["margin"]):
        raise DataError(f"{where}: 'margin' is {row['margin']}; expected a finite number")
    if is_chat:
        check_prompt(row["messages"], where, " and ".join(SIDES))
