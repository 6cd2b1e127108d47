r"""Blocks of an answer: a thought, text and calls of tools, for dialects that show them one by one.

    <think>\n  I add.  \n</think>\n\n  The sum is 5.     <tool_call>...
    opening    thought  closing         text              calls

The white space around a thought belongs to its marks. A block of a thought carries its marks in a field that clients
return unchanged, so that the answer of a later request is the recorded text again, character for character.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rlite.rollout.tools.formats import THOUGHTS, num_before, opened_thought
from rlite.services.endpoint.exchange import Choice, Delta, Exchange, calls_of

OTHER_MARKS = "<think>\n", "\n</think>\n\n"
"""marks around thoughts of other models, whose blocks do not carry ours"""


@dataclass(eq=False)
class Block:
    """A part of an answer."""

    kind: Literal["thought", "text", "call"]
    index: int
    """number among the blocks of the answer"""
    text: str = ""
    """the thought, the text, or the arguments of the call as JSON"""
    marks: str = ""
    """the marks around a thought, for `marked`"""
    call_id: str = ""
    name: str = ""
    """name of the called tool"""


@dataclass(frozen=True)
class BlockEvent:
    """Something that happened to a block: it began, got more text, or ended. With the last one, the answer ended."""

    kind: Literal["begin", "text", "end"]
    block: Block
    text: str = ""


Settling = Generator[BlockEvent, None, bool]
"""yields events; returns True if the phase has ended"""


class Blocks:
    """Blocks of one answer, as its text arrives."""

    def __init__(self, prompt: str) -> None:
        self.blocks: list[Block] = []
        self._held = self._opening = self._closing = ""
        self._mark = THOUGHTS.get(opened_thought(prompt), "")
        thought: list[Callable[[bool], Settling]] = [self._thought, self._after]
        self._phases = [*thought, self._text] if self._mark else [self._start, *thought, self._text]

    def feed(self, text: str, is_last: bool = False) -> Iterator[BlockEvent]:
        """Yield what further text does."""
        self._held += text
        while self._phases and (yield from self._phases[0](is_last)):
            del self._phases[0]
        if is_last and self.blocks:
            yield from self._ended(self.blocks[-1])

    def finish(self, choice: Choice) -> Iterator[BlockEvent]:
        """Yield the calls of a complete answer as blocks."""
        for call in calls_of(choice.turn):
            function = call["function"]
            block = self._begun("call", call_id=call["id"], name=function["name"])
            yield BlockEvent("begin", block)
            yield self._more(block, function["arguments"])
            yield BlockEvent("end", block)

    def _begun(self, kind: Literal["thought", "text", "call"], **parts: str) -> Block:
        self.blocks.append(Block(kind, len(self.blocks), **parts))
        return self.blocks[-1]

    def _more(self, block: Block, text: str) -> BlockEvent:
        block.text += text
        return BlockEvent("text", block, text)

    def _ended(self, block: Block) -> Iterator[BlockEvent]:
        if block.kind == "thought":
            block.marks = json.dumps([self._opening, self._closing])
        yield BlockEvent("end", block)

    def _start(self, is_last: bool) -> Settling:
        # looks for a thought at the beginning
        begun = self._held.lstrip()
        mark = next((mark for mark in THOUGHTS if begun.startswith(mark)), None)
        if mark is None and not is_last and any(mark.startswith(begun) for mark in THOUGHTS):
            return False
        if mark is None:
            self._phases = [self._start, self._text]  # the first one ends now
        else:
            self._opening = self._held[: self._held.index(mark) + len(mark)]
            self._held, self._mark = self._held[len(self._opening) :], THOUGHTS[mark]
        return True
        yield

    def _thought(self, is_last: bool) -> Settling:
        if not self.blocks:
            self._opening += self._taken(len(self._held) - len(self._held.lstrip()))
            if not self._held and not is_last:
                return False
            yield BlockEvent("begin", self._begun("thought"))
        before = self._held.partition(self._mark)[0]
        has_ended = len(before) < len(self._held)
        num_settled = len(before) if has_ended else num_before(self._held, [self._mark])
        settled = len(self._held) if is_last and not has_ended else len(self._held[:num_settled].rstrip())
        if settled:
            yield self._more(self.blocks[0], self._taken(settled))
        if has_ended:
            self._closing = self._taken(len(before) - settled + len(self._mark))
        return has_ended

    def _after(self, is_last: bool) -> Settling:
        # skips the white space after a thought
        self._closing += self._taken(len(self._held) - len(self._held.lstrip()))
        if self._held:
            yield from self._ended(self.blocks[0])
        return bool(self._held)

    def _text(self, is_last: bool) -> Settling:
        if self._held:
            if not self.blocks or self.blocks[-1].kind != "text":
                yield BlockEvent("begin", self._begun("text"))
            yield self._more(self.blocks[-1], self._taken(len(self._held)))
        return False

    def _taken(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken


def blocks_of(exchange: Exchange, choice: Choice) -> list[Block]:
    """Return the blocks of a complete answer."""
    found = Blocks(exchange.prompt(choice.index).text)
    for events in (found.feed(choice.content, is_last=True), found.finish(choice)):
        for _ in events:
            pass
    return found.blocks


async def block_events(
    exchange: Exchange, events: AsyncIterator[Delta | Choice]
) -> AsyncGenerator[BlockEvent | Choice | None, None]:
    """Yield None when the answer begins, what happens to its blocks, and the whole choice when it has ended."""
    found = Blocks(exchange.prompt(0).text)
    is_begun = False
    async for event in events:
        if not is_begun:
            is_begun = True
            yield None
        is_last = isinstance(event, Choice)
        for part in found.feed(event.rest if isinstance(event, Choice) else event.text, is_last):
            yield part
        if isinstance(event, Choice):
            for part in found.finish(event):
                yield part
            yield event


def marked(thought: str, marks: Any) -> str:
    """Return a thought with the marks that its block carries; without them, with those of most models."""
    try:
        opening, closing = json.loads(marks)
    except (TypeError, ValueError):
        opening, closing = OTHER_MARKS
    return f"{opening}{thought}{closing}"
