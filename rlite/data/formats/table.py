"""The table of formats: how each is recognised, and its conversion. To read another format, add an entry to FORMATS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlite.data.formats.conversions import (
    alpaca,
    alpaca_prompt,
    asked,
    chat,
    completed,
    conversation,
    has_chat,
    has_implicit_prompt,
    implicit_pair,
    labelled,
    pair,
    plain_text,
    prompted_pair,
    sharegpt,
)
from rlite.data.tables import Row

RowKind = Literal["demonstrations", "preferences", "unpaired", "prompts"]
"""kinds of rows, for: sft; rm and dpo; kto; ppo"""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of rows."""

    name: str
    """name in the report at the start"""
    columns: tuple[str, ...]
    """columns that every row has"""
    optional: tuple[str, ...] = ()
    """further columns that are read"""
    suits: Callable[[Row], bool] = lambda row: True
    """returns True if a row that has the columns has this format"""
    convert: Callable[[Row, str], Row]
    """row, name of the row in messages -> the row in rlite's form; raises DataError"""

    def fits(self, row: Row) -> bool:
        """Return whether a row has this format."""
        return all(row.get(column) is not None for column in self.columns) and self.suits(row)

    def __str__(self) -> str:
        """Return the name and the columns."""
        return f"{self.name} ({', '.join(self.columns)})"


_ANSWERS = ("response", "completion")
ALPACA_OPTIONAL = ("input", "system", "history")

FORMATS: dict[RowKind, tuple[Format, ...]] = {
    "demonstrations": (
        Format(name="conversations", columns=("messages",), optional=("tools",), convert=conversation),
        Format(
            name="ShareGPT conversations", columns=("conversations",), optional=("system", "tools"), convert=sharegpt
        ),
        *(
            Format(
                name=f"chat prompts and {answer}s",
                columns=("prompt", answer),
                optional=("tools",),
                suits=has_chat("prompt", answer),
                convert=completed(answer),
            )
            for answer in _ANSWERS
        ),
        *(
            Format(name=f"raw prompts and {answer}s", columns=("prompt", answer), convert=completed(answer))
            for answer in _ANSWERS
        ),
        Format(name="Alpaca instructions", columns=("instruction", "output"), optional=ALPACA_OPTIONAL, convert=alpaca),
        Format(name="plain texts", columns=("text",), convert=plain_text),
    ),
    "preferences": (
        Format(
            name="preferences between conversations",
            columns=("chosen", "rejected"),
            optional=("prompt", "tools", "margin"),
            suits=has_implicit_prompt,
            convert=implicit_pair,
        ),
        Format(
            name="preferences after conversations",
            columns=("messages", "chosen", "rejected"),
            optional=("tools", "margin"),
            convert=lambda row, where: pair(row, where, chat(row["messages"], where, "messages")),
        ),
        Format(
            name="preferences after ShareGPT conversations",
            columns=("conversations", "chosen", "rejected"),
            optional=("system", "tools", "margin"),
            convert=lambda row, where: pair(row, where, sharegpt(row, where)["messages"]),
        ),
        Format(
            name="preferences after chat prompts",
            columns=("prompt", "chosen", "rejected"),
            optional=("tools", "margin"),
            suits=has_chat("prompt", "chosen", "rejected"),
            convert=prompted_pair,
        ),
        Format(
            name="raw preferences",
            columns=("prompt", "chosen", "rejected"),
            optional=("margin",),
            convert=prompted_pair,
        ),
        Format(
            name="preferences after Alpaca instructions",
            columns=("instruction", "chosen", "rejected"),
            optional=(*ALPACA_OPTIONAL, "margin"),
            convert=lambda row, where: pair(row, where, alpaca_prompt(row, where)),
        ),
    ),
    "unpaired": (
        Format(
            name="labelled completions of conversations",
            columns=("messages", "completion", "label"),
            optional=("tools",),
            convert=labelled,
        ),
        Format(
            name="labelled chat completions",
            columns=("prompt", "completion", "label"),
            optional=("tools",),
            suits=has_chat("prompt", "completion"),
            convert=labelled,
        ),
        Format(name="labelled raw completions", columns=("prompt", "completion", "label"), convert=labelled),
    ),
    "prompts": (
        Format(
            name="conversations",
            columns=("messages",),
            optional=("tools",),
            convert=asked("messages"),
        ),
        Format(
            name="chat prompts",
            columns=("prompt",),
            suits=has_chat("prompt"),
            optional=("tools",),
            convert=asked("prompt"),
        ),
        Format(name="raw prompts", columns=("prompt",), convert=lambda row, where: row),
        Format(name="tokens", columns=("input_ids",), convert=lambda row, where: row),
        Format(
            name="ShareGPT conversations",
            columns=("conversations",),
            optional=("system",),
            convert=lambda row, where: {
                **{name: value for name, value in row.items() if name != "conversations"},
                **sharegpt(row, where),
            },
        ),
        Format(
            name="Alpaca instructions",
            columns=("instruction",),
            optional=ALPACA_OPTIONAL,
            convert=lambda row, where: {**row, "messages": alpaca_prompt(row, where)},
        ),
    ),
}
"""formats of each kind of rows; a row has the first one that fits"""


def format_of(row: Row, kind: RowKind) -> Format | None:
    """Return the first known format that fits a row; None if there is none."""
    return next((known for known in FORMATS[kind] if known.fits(row)), None)
