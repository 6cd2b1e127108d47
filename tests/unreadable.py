"""Texts of yaml and JSON that make their readers hang or raise errors of many kinds."""

from __future__ import annotations

BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{number}: &a{number} {{{', '.join(f'k{place}: *a{number - 1}' for place in range(9))}}}\n"
    for number in range(1, 10)
)
"""mapping of ten keys that stands for a billion values"""
UNREADABLE = [
    BOMB,
    "trainer: &a\n  x: *a\n",
    "a: 2026-13-45",
    "a: !!bool foo",
    "a: !!float foo",
    "a: !!int foo",
    "a: !!timestamp foo",
    "a: [",
    f"a: {'9' * 5000}",
    f"a: 0x{'f' * 5000}",
    "[" * 10_000,
    "{x: " * 900 + "1" + "}" * 900,
    f"a: {'x' * 2**20}",
]
"""configs of runs"""
