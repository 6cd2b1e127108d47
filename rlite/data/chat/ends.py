"""The ends of learnt answers, compared with the tokens at which the model stops."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlite.errors import ConfigError, DataError
from rlite.wording import counted

EndChoice = Literal["keep", "append"]


class LearntEnds:
    """Ends each learnt answer with one token at which the model stops, and gathers the tokens that are new to it.

    Args:
        tokenizer: the model's tokenizer.
        stop_ids: tokens at which the model stops.
        choice: "keep" learns each answer as the chat template writes it, and leaves the model's end tokens as they are.
            "append" puts the tokenizer's end token after an answer to which the template gives no token as its end;
            None refuses such an answer.
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
        """Take note of a token that ends learnt answers.

        Raises:
            DataError: the token is new, and the model can get no further end token.
        """
        if end in self._stop_ids or end in self.new or self._choice == "keep":
            return
        if self.is_settled:
            raise DataError(
                f"{where}: answers end with {self._names([end])}, no end token of the model, and no earlier row "
                "ended so; let the first rows have such an answer, or use data.end_token=keep"
            )
        self.new.add(end)

    def end_turn(
        self,
        ids: list[int],
        turn: tuple[int, int],
        known: Collection[int],
        is_final: bool,
        is_rewritten: bool,
        where: str,
    ) -> tuple[list[int], int]:
        """Return a row and the end of a turn, so that the turn ends with a token at which the model stops.

        Args:
            ids: the row.
            turn: the turn's tokens [start, end).
            known: tokens that end answers in this chat template, the usual one first.
            is_final: whether the row ends with the turn.
            is_rewritten: whether the template writes the turn otherwise when the row ends with it.
            where: the row's name in errors.

        Raises:
            ConfigError: no token ends the turn.
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
        elif is_rewritten or (self._choice == "append" and not is_final):
            return ids, end
        elif written not in self._special and written not in known:
            if not is_final or not (known or self._choice == "append"):
                raise ConfigError(self._no_end(ids[max(last - 8, start) : end], where))
            written = next(iter(known), self._tokenizer.eos_token_id)
            self._num_appended += 1
            ids, end = [*ids[:end], written, *ids[end:]], end + 1
        self.see(written, where)
        return ids, end

    def describe(self, new: Collection[int]) -> dict[str, str]:
        """Return in words, by topic, what is learnt otherwise than the data and the model say.

        Args:
            new: tokens that become end tokens of the model.
        """
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
