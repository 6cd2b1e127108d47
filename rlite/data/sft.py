"""Demonstrations: rows of `prompt` and `response`, of `messages`, or of `text`, converted to token rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlite.data.chat.answers import learnt_turns
from rlite.data.chat.ends import LearntEnds
from rlite.data.chat.masks import ChatEncoder, check_messages
from rlite.data.chat.raw import answer_encoder, text_encoder
from rlite.data.tables import check_columns
from rlite.data.tokens import TokenRows, Tokens, tokenise
from rlite.errors import DataError


def sft_rows(
    rows: Sequence[Mapping[str, Any]],
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
    `rlite.data.formats.normalise` converts other formats to these.

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
    is_chat = bool(rows) and rows[0].get("messages") is not None
    is_text = bool(rows) and not is_chat and rows[0].get("text") is not None and rows[0].get("prompt") is None
    for number, row in enumerate(rows):
        at = f"{where}, row index {number}"
        if not is_chat:
            check_columns(row, {"text": str} if is_text else {"prompt": str, "response": str}, at)
            continue
        check_columns(row, {"messages": list}, at)
        check_messages(_conversation(row), at)
        if not any(message["role"] == "assistant" for message in _conversation(row)):
            raise DataError(f"{at}: 'messages' has no turn of the assistant, hence nothing to learn")
    if is_text:
        return tokenise(len(rows), text_encoder(tokenizer, rows, ends), max_length, where)
    if not is_chat:
        return tokenise(len(rows), answer_encoder(tokenizer, rows, ["response"], ends), max_length, where)
    encoder = ChatEncoder(tokenizer, ends=ends, **template_options)

    def encode_chats(numbers: range) -> list[list[Tokens]]:
        names = [f"{where}, row index {number}" for number in numbers]
        chats = encoder.encode(
            [_conversation(rows[number]) for number in numbers],
            names,
            [rows[number].get("tools") for number in numbers],
        )
        tokens = []
        for number, chat, name in zip(numbers, chats, names, strict=True):
            row = rows[number]
            first = len(row["messages"]) if row.get("completion") else 0
            turns = learnt_turns(chat, _conversation(row), first, name)[-1 if last_turn_only else 0 :]
            ended = encoder.ended(chat, turns, name)
            tokens.append([(ended.input_ids, ended.mask(turns))])
        return tokens

    return tokenise(len(rows), encode_chats, max_length, where)


def _conversation(row: Mapping[str, Any]) -> list[Any]:
    return [*row["messages"], *(row.get("completion") or ())]
