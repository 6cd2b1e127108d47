"""Rows of supervised training, converted to token rows: demonstrations, preferences and labelled answers.

A demonstration is a `prompt` with a `response`, or `messages`, or a `text`. A preference is a prompt with a chosen and
a rejected response. A labelled answer is a prompt, an answer and whether the answer is desirable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rlite.data.chat.answers import chat_encoder, prompted_answer_encoder
from rlite.data.chat.ends import LearntEnds
from rlite.data.chat.masks import ChatEncoder, check_messages
from rlite.data.readers.tables import check_columns
from rlite.data.source import Table
from rlite.data.tokens import TokenRows, answer_encoder, text_encoder, tokenise
from rlite.errors import DataError


def sft_rows(
    rows: Table,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    where: str = "data.path",
    ends: LearntEnds | None = None,
    last_turn_only: bool = False,
    **template_options: Any,
) -> TokenRows:
    """Tokenise demonstrations for supervised fine-tuning.

    All rows have the form of the first row. Raw: `prompt` and `response` are texts; the response and the
    end-of-sequence token after it are learnt. Messages: every turn of the assistant is learnt, with the token that ends
    it; `tools` (JSON schemas) may be given, too. If a row also has a `completion`, messages that follow `messages`,
    only the turns in the completion are learnt. A message with `weight`, `train` or `loss_mask` 0 is not learnt. A
    `text` is learnt whole, with the end-of-sequence token. A row longer than `max_length` is cut at its end.
    `rlite.data.readers.columns` converts other formats to these.

    Args:
        rows: the table.
        tokenizer: the model's tokenizer.
        max_length: most tokens of a row.
        where: the table's name in messages, such as "data.path=x.json".
        ends: ends learnt answers with tokens at which the model stops; None learns them as the template writes them.
        last_turn_only: learn only the last of the turns.
        **template_options: options of the chat template, such as `enable_thinking=False`.

    Returns:
        One token row per kept row; `tally` counts cut and dropped rows (see `tokenise`).

    Raises:
        DataError: a row has another form, the template refuses a conversation, or a conversation has no turn of the
            assistant; the message names row and column.
        ConfigError: the tokenizer cannot do this.
    """
    given = {name for name, value in (rows[0] if rows else {}).items() if value is not None}
    is_chat, is_text = "messages" in given, "text" in given and "prompt" not in given
    for number, row in enumerate(rows):
        at = f"{where}, row index {number}"
        if not is_chat:
            check_columns(row, {"text": str} if is_text else {"prompt": str, "response": str}, at)
            continue
        check_columns(row, {"messages": list}, at)
        check_messages(_conversation(row), at)
        if not any(message["role"] == "assistant" for message in _conversation(row)):
            raise DataError(f"{at}: 'messages' has no turn of the assistant, hence nothing to learn")
    if not is_chat:
        raw = text_encoder(tokenizer, rows, ends) if is_text else answer_encoder(tokenizer, rows, ["response"], ends)
        return tokenise(len(rows), raw, max_length, where)

    def conversations(row: Mapping[str, Any]) -> list[tuple[list[Any], int]]:
        return [(_conversation(row), len(row["messages"]) if row.get("completion") else 0)]

    encoder = ChatEncoder(tokenizer, ends=ends, **template_options)
    encode = chat_encoder(encoder, rows, conversations, where, last_turn_only, is_cut=False)
    return tokenise(len(rows), encode, max_length, where)


def _conversation(row: Mapping[str, Any]) -> list[Any]:
    return [*row["messages"], *(row.get("completion") or ())]


SIDES = ("chosen", "rejected")


def preference_rows(
    rows: Table, tokenizer: PreTrainedTokenizerBase, max_length: int, where: str = "data.path", **template_options: Any
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


def labelled_rows(
    rows: Table, tokenizer: PreTrainedTokenizerBase, max_length: int, where: str = "data.path", **template_options: Any
) -> TokenRows:
    """Tokenise labelled answers for KTO.

    `rlite.data.chat.answers.prompted_answer_encoder` has the form of a row. `completion` is the answer, and `label` is
    true if it is desirable. `loss_mask` marks the answer with its end, which is the end of the row. A row longer than
    `max_length` is cut at its end.

    `max_length`: most tokens of a row. `**template_options`: options of the chat template, such as
    `enable_thinking=False`. Returns one token row per kept row. Batches also have `is_desirable` [N] bool. `tally`
    counts cut and dropped rows (see `tokenise`).
    """
    encode = prompted_answer_encoder(rows, tokenizer, ["completion"], {"label": bool}, where, template_options)
    tokens = tokenise(len(rows), encode, max_length, where)
    labels = [rows[number]["label"] for number in tokens.source]
    return replace(tokens, per_row={"is_desirable": np.asarray(labels, dtype=bool)})


def mismatched(batch: TensorDict, max_length: int) -> TensorDict | None:
    """Return a batch of each prompt with the answer to another prompt of the batch.

    If all prompts differ, prompt i has the answer of row i + 1, and the last prompt the answer of row 0. If some are
    equal, their rows are taken one after another, and the answers are shifted by the rows of the most frequent prompt.
    The result depends only on the rows and their order.

    `batch`: a right-padded batch. A row's answer begins with the first token of its `loss_mask` and ends the row.
    `max_length`: most tokens of a row; a longer one is cut at its end. Returns a batch with `input_ids`,
    `attention_mask` and `loss_mask` [M, L]. It has no row for a prompt that would get an answer to the same prompt;
    None if that leaves no row.
    """
    lengths, starts = batch["attention_mask"].sum(-1).tolist(), batch["loss_mask"].int().argmax(-1).tolist()
    prompts = [tuple(ids[:start].tolist()) for ids, start in zip(batch["input_ids"], starts, strict=True)]
    pairs = _partners(prompts)
    if not pairs:
        return None

    def joined(key: str) -> Tensor:
        """Return a key of prompts and of the answers to others."""
        values = batch[key]
        made = [torch.cat([values[a, : starts[a]], values[b, starts[b] : lengths[b]]])[:max_length] for a, b in pairs]
        return pad_sequence(made, batch_first=True)

    columns = {key: joined(key) for key in ("input_ids", "attention_mask", "loss_mask")}
    return TensorDict(columns, batch_size=[len(pairs)])


def longest_mismatch(rows: TokenRows) -> int:
    """Return the most tokens that a prompt has with the answer of any row."""
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
