"""The ends of learnt answers, compared with the tokens at which the model stops.

Special tokens in messages: a chat template would turn `<|im_end|>` in a message into the end of a turn.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from transformers import AddedToken, PreTrainedTokenizerBase

from rlite.data.prompts import BREAK
from rlite.errors import ConfigError, DataError
from rlite.wording import counted

EndChoice = Literal["keep", "append"]


class LearntEnds:
    """Ends each learnt answer with one token at which the model stops, and gathers the tokens that are new to it.

    `choice`: "keep" learns each answer as the chat template writes it, and leaves the model's end tokens as they are.
    "append" puts the tokenizer's end token after an answer to which the template gives no token as its end; None
    refuses such an answer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int], choice: EndChoice | None = None
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._stop_ids, self._choice = frozenset(stop_ids), choice
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
        self.new: set[int] = set()
        """end tokens that are learnt, and at which the model did not stop before"""
        self.is_settled = False
        """true when no further token may become an end: the model is already trained or served with `new`"""
        self.num_turns = self.num_rewritten = 0
        """learnt turns, and how many of them are never generated so, because the template rewrites history"""
        self._num_extended = self._num_appended = 0

    def see(self, end: int, where: str = "") -> None:
        """Take note of a token that ends learnt answers."""
        if end in self._stop_ids or end in self.new or self._choice == "keep":
            return
        if self.is_settled:
            found = f"answers end with {self._names([end])}, no end token of the model, and no earlier row ended so"
            raise DataError(f"{where}: {found}; let the first rows have such an answer, or use data.end_token=keep")
        self.new.add(end)

    def end_turn(
        self, ids: list[int], turn: tuple[int, int], known: Sequence[int], is_last: bool, is_rewritten: bool, where: str
    ) -> tuple[list[int], int]:
        """Return a row and the end of a turn, so that the turn ends with a token at which the model stops.

        `turn`: the turn's tokens [start, end).
        """
        (start, end), last = turn, turn[1]
        while last > start and not self._tokenizer.decode(ids[last - 1 : last]).strip():
            last -= 1
        written, following = ids[last - 1], ids[end] if end < len(ids) else None
        if self._choice == "keep" or last == start or written in self._stop_ids:
            return ids, end
        if following in self._stop_ids or following in known:
            self._num_extended += 1
            written, end = ids[end], end + 1
        elif is_rewritten or (self._choice == "append" and not is_last):
            return ids, end
        elif written not in self._special and written not in known:
            if not is_last or not (known or self._choice == "append"):
                raise ConfigError(self._no_end(ids[max(last - 8, start) : end], where))
            written = next(iter(known), self._tokenizer.eos_token_id)
            self._num_appended += 1
            ids, end = [*ids[:end], written, *ids[end:]], end + 1
        self.see(written, where)
        return ids, end

    def describe(self, new: Collection[int]) -> dict[str, str]:
        """Return in words, by topic, what is learnt otherwise than the data and the model say."""
        said = []
        if self._num_extended:
            said.append(f"the token after {counted(self._num_extended, 'answer')} is learnt as the end")
        if self._num_appended:
            said.append(f"an end is appended to {counted(self._num_appended, 'answer')}")
        if new:
            said.append(f"{self._names(new)} added to the model's end tokens ({self._names(self._stop_ids)})")
        found = {"end of answers": "; ".join(said)} if said else {}
        if self.num_rewritten:
            found["rewritten history"] = (
                f"{self.num_rewritten / self.num_turns:.0%} of {self.num_turns} learnt turns are never generated so: "
                "the chat template rewrites earlier answers, or begins them otherwise when it asks for them; "
                "data.last_turn_only=true learns the last turn alone"
            )
        return found

    def _no_end(self, tail: list[int], where: str) -> str:
        return (
            f"{where}: the chat template ends an answer with {self._tokenizer.decode(tail)!r}, without one token at "
            f"which the model can stop (now: {self._names(self._stop_ids)}); use a template whose end is a token of "
            f"the tokenizer, data.end_token=append to learn {self._tokenizer.eos_token!r} after each last answer, or "
            "data.end_token=keep"
        )

    def _names(self, tokens: Collection[int]) -> str:
        return ", ".join(repr(self._tokenizer.convert_ids_to_tokens(token)) for token in sorted(tokens)) or "none"


_ALIAS = f"\U000f1ce7{secrets.randbits(64)}-"
"""begins the other names of special tokens"""


class EscapingTokenizer:
    """Tokenizer whose chat template leaves special tokens in messages as plain text.

    Use it in place of the tokenizer in workflows, sessions and `ChatEncoder`. Tools are escaped, and every message
    except the assistant's. Text without special tokens gives the same tokens as before. Raw text is not escaped.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(f"{type(tokenizer).__name__} is no fast tokenizer, which escape_special_tokens needs")
        self._tokenizer = tokenizer
        special = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._names = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        # a copy that knows the special tokens of the template by other names, and by their own names none
        self._aliases = {name: f"{_ALIAS}{number}-" for number, name in enumerate(self._names)}
        self._plain: Any = copy.deepcopy(tokenizer)
        self._plain.add_tokens([_renamed(special[name], alias) for name, alias in self._aliases.items()])
        self._plain.split_special_tokens = True
        self._plain.backend_tokenizer.encode_special_tokens = True  # now: no call of any thread changes it later
        self._ids = {
            self._plain.convert_tokens_to_ids(alias): tokenizer.convert_tokens_to_ids(name)
            for name, alias in self._aliases.items()
        }

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # a copy in the making
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, conversation: Any, tools: Any = None, tokenize: bool = True, **options: Any) -> Any:
        """Render a conversation as the tokenizer does, with special tokens in messages escaped.

        `tools`: JSON schemas, or None. Returns a list of tokens, or text with BREAK in the names of special tokens that
        are plain text.
        """
        messages = [message if message["role"] == "assistant" else self._escaped(message) for message in conversation]
        kept = {key: value for key, value in options.items() if key not in ("return_dict", "return_tensors")}
        text = self._tokenizer.apply_chat_template(messages, tools=self._escaped(tools), tokenize=False, **kept)
        return self(text, add_special_tokens=False)["input_ids"] if tokenize else text

    def __call__(self, text: Any, **options: Any) -> Any:
        """Tokenise rendered text, or a list of texts.

        Returns `input_ids` and the other keys that the tokenizer returns.
        """
        if not isinstance(text, str):
            rows = [self(one, **options) for one in text]
            return {key: [row[key] for row in rows] for key in (rows[0] if rows else ("input_ids",))}
        if BREAK not in text:
            return dict(self._tokenizer(text, **options))
        renamed, origin = self._rename(text)
        encoded: dict[str, Any] = dict(self._plain(renamed, **options))
        encoded["input_ids"] = [self._ids.get(token, token) for token in encoded["input_ids"]]
        if "offset_mapping" in encoded:
            offsets = encoded["offset_mapping"]
            encoded["offset_mapping"] = [(origin[a], origin[b - 1] + 1 if b > a else origin[a]) for a, b in offsets]
        return encoded

    def _rename(self, text: str) -> tuple[str, list[int]]:
        """Return the text without BREAK and with aliases of special tokens, and the old place of each character."""
        parts: list[str] = []
        origin: list[int] = []
        at = 0
        for found in re.finditer(f"{BREAK}|{self._special.pattern}", text):
            start, end = found.span()
            alias = self._aliases.get(found[0], "")  # none of BREAK
            parts += [text[at:start], alias]
            origin += [*range(at, start), *[start] * (len(alias) - 1), *([end - 1] if alias else [])]
            at = end
        return "".join([*parts, text[at:]]), [*origin, *range(at, len(text) + 1)]

    def _escaped(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: part if key == "role" else self._escaped(part) for key, part in value.items()}
        if not isinstance(value, str):
            return [self._escaped(part) for part in value] if isinstance(value, Sequence) else value
        text = self._special.sub(lambda found: found[0][0] + BREAK + found[0][1:], value)
        # what the template writes next to it may make a name of it
        ends = any(text.endswith(name[:size]) for name in self._names for size in range(1, len(name)))
        begins = any(text.startswith(name[-size:]) for name in self._names for size in range(1, len(name)))
        return BREAK * begins + text + BREAK * ends


def _renamed(token: Any, name: str) -> AddedToken:
    return AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False)
