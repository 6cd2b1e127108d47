"""The code blocks of the README and of the pages in docs, and what a page says of each.

A comment before a block says that it is not run here, or how it ends:

    <!-- not run: REASON -->        nothing runs it
    <!-- run by tests/FILE.py -->   this test reads the page, or is what the block runs
    <!-- ends with: TEXT -->        the block runs here, and its command fails with a message that has this text

A block of the language `text` is output and not code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "bash", "sh", "yaml", "json", "toml")
MARKER = re.compile(
    r"<!-- (not run: (?P<reason>.+?)|run by (?P<test>tests/[\w/]+\.py)|ends with: (?P<failure>.+?)) -->"
)


@dataclass(frozen=True)
class Block:
    """One block between fences."""

    page: Path
    line: int
    """number of the line of its first fence, from 1"""
    language: str
    text: str
    before: str
    """last line before the block that is not empty"""

    @property
    def place(self) -> str:
        """Page and line, as an editor finds them."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @cached_property
    def reason(self) -> str | None:
        """Why nothing runs the block, if nothing does."""
        found = MARKER.fullmatch(self.before)
        return found["reason"] if found else None

    @cached_property
    def test(self) -> str | None:
        """File of the test that runs the block, if it is another one."""
        found = MARKER.fullmatch(self.before)
        return found["test"] if found else None

    @cached_property
    def failure(self) -> str | None:
        """Text of the message with which the block's command fails, if it has to fail."""
        found = MARKER.fullmatch(self.before)
        return found["failure"] if found else None

    @property
    def is_run_here(self) -> bool:
        """True if `tests/docs` runs the block."""
        return self.reason is None and self.test is None


def pages() -> list[Path]:
    """Return the README and every page of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the code blocks of a page in their order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    begin: int | None = None
    for number, line in enumerate(lines):
        if begin is None and line.startswith("```"):
            begin = number
        elif begin is not None and line == "```":
            language, text = lines[begin].removeprefix("```"), "\n".join(lines[begin + 1 : number]) + "\n"
            before = next((each for each in reversed(lines[:begin]) if each), "")
            if language != "text":
                yield Block(page, begin + 1, language, text, before)
            begin = None


def commands(text: str) -> list[str]:
    """Return the commands of a block of a shell, each on one line and without comments."""
    joined = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in joined if line.strip() and not line.lstrip().startswith("#")]
