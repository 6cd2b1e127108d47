"""Pages of the KV cache, without torch: reference counts, and a radix tree of the tokens that are in them.

A page has PAGE positions. Sequences that begin with the same tokens share full pages by reference. Pages of sequences
that have ended stay in the tree until others need the room, the least recently used first. A page that is not full
belongs to one sequence, which writes to it: whoever continues from its first tokens copies them to a page of its own.

    root -- page of 64 tokens -+- page of 64 tokens -- page of 17 tokens
                               +- page of 64 tokens -- ...

A node's page is referenced once by the node, and once by each running sequence that reads it. A sequence that refers to
a node's page refers to the pages of all nodes above it, too. So every page that only nodes refer to can be evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

PAGE = 64
"""positions of a page, as many as a block of keys in decode steps has"""
TRASH = 0
"""the page of rows that belong to no sequence; nobody reads what they write"""
_TOKEN = 8
"""bytes of a token in a key"""


@dataclass(eq=False, slots=True)
class Node:
    """The tokens of one page, behind those of its parent."""

    key: bytes
    """the tokens; only a leaf has fewer than PAGE"""
    page: int
    parent: Node | None = None
    children: dict[bytes, Node] = field(default_factory=dict)
    state: int | None = None
    """slot of the recurrent state behind the last token, if one is kept"""
    used: int = 0
    """time of the last use"""


class Prefix(NamedTuple):
    """The leading tokens of a sequence whose keys and values are in the cache."""

    pages: Sequence[int] = ()
    """full pages, which the sequence shares"""
    tail: int | None = None
    """page whose first tokens are copied"""
    num_tokens: int = 0
    state: int | None = None
    """slot of the recurrent state behind the tokens"""


class PagePool:
    """All pages of one cache, and the tree.

    `num_pages`: number of pages; page TRASH belongs to no sequence. `max_branches`: most leaves of the tree. It bounds
    the memory that ended sequences touch. `states`: slots for recurrent states. If there are any, a prefix is known
    where a state is kept.
    """

    def __init__(self, num_pages: int, max_branches: int, is_exact: bool = False, states: range = range(0)) -> None:
        self._max_branches, self._is_exact, self._has_states = max_branches, is_exact or bool(states), bool(states)
        self._free = list(range(num_pages - 1, TRASH, -1))
        self._num_refs, self._num_nodes = [0] * num_pages, [0] * num_pages
        self._num_idle = 0
        """pages that only nodes refer to"""
        self._root = Node(b"", TRASH)
        self._leaves: dict[Node, None] = {}
        self._free_states = list(reversed(states))
        self._stateful: dict[Node, None] = {}
        self._clock = count(1)

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated."""
        return len(self._free) + self._num_idle

    def allocate(self, num: int) -> list[int]:
        """Return pages with one reference each, at most `num_available`."""
        while len(self._free) < num:
            self._drop(self._oldest_leaf())
        pages = [self._free.pop() for _ in range(num)]
        self.hold(pages)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._count(page, 1, 0)

    def release(self, pages: Iterable[int]) -> None:
        """Take a reference from each page."""
        for page in pages:
            self._count(page, -1, 0)

    def match(self, tokens: Sequence[int], root: Node | None = None) -> Prefix:
        """Return the longest known prefix of some tokens.

        `root`: root of another tree of the same pages; None is the pool's own. Trees of other weights are apart.
        """
        data, path = _bytes(tokens), [root or self._root]
        size = PAGE * _TOKEN
        for start in range(0, len(data) - size + 1, size):
            if (child := path[-1].children.get(data[start : start + size])) is None:
                break
            path.append(child)
        tail, num_shared = self._tail(path[-1], data[(len(path) - 1) * size :])
        if tail is None and self._has_states:
            while path[-1].state is None and len(path) > 1:
                path.pop()
        now = next(self._clock)
        for node in path:
            node.used = now
        if tail is not None:  # the state of a session goes on elsewhere
            tail.used = 0 if self._has_states else now
        pages = [node.page for node in path[1:]]
        state = (path[-1] if tail is None else tail).state
        return Prefix(pages, None if tail is None else tail.page, len(pages) * PAGE + num_shared, state)

    def insert(self, tokens: Sequence[int], pages: list[int], has_tail: bool, root: Node | None = None) -> Node:
        """Make the pages of a sequence known.

        `pages`: pages of the sequence. Full pages that are known from another sequence replace its own.
        """
        data, node, now = _bytes(tokens), root or self._root, next(self._clock)
        for index in range(-(-len(tokens) // PAGE) if has_tail else len(tokens) // PAGE):
            key = data[index * PAGE * _TOKEN : (index + 1) * PAGE * _TOKEN]
            child = node.children.get(key) or self._add(node, key, pages[index])
            if child.page != pages[index] and len(key) == PAGE * _TOKEN:
                self.hold([child.page])
                self.release([pages[index]])
                pages[index] = child.page
            child.used, node = now, child
        while len(self._leaves) > self._max_branches and self._drop_branch():
            pass
        return node

    def keep_state(self, node: Node, may_evict: bool) -> int | None:
        """Find a slot for the state behind a node's last token.

        Returns the slot to which the state is copied. None if it is kept already, or there is no slot.
        """
        if node.state is not None or node.parent is None or not (self._free_states or may_evict):
            return None
        if not self._free_states:
            self._forget_state(min(self._stateful, key=lambda other: (len(other.key) < PAGE * _TOKEN, other.used)))
        node.state, self._stateful[node] = self._free_states.pop(), None
        return node.state

    def forget(self) -> None:
        """Empty all trees."""
        while self._leaves:
            self._drop(next(iter(self._leaves)))

    def _tail(self, node: Node, rest: bytes) -> tuple[Node | None, int]:
        """Return the child that shares most leading tokens with `rest`, and their number."""
        tail, most = None, 0
        for key, child in node.children.items():
            if key[: most + _TOKEN] == rest[: most + _TOKEN] and len(rest) > most:
                num = _common(key, rest)
                if (num == len(key) or not self._is_exact) and (child.state is not None or not self._has_states):
                    tail, most = child, num
        return tail, most // _TOKEN

    def _add(self, parent: Node, key: bytes, page: int) -> Node:
        if self._num_nodes[page] and not self._has_states:  # the page has grown
            self._drop(next(child for child in parent.children.values() if child.page == page))
        node = parent.children[key] = Node(key, page, parent)
        self._leaves.pop(parent, None)
        self._leaves[node] = None
        self._count(page, 1, 1)
        return node

    def _drop(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key], self._leaves[node]
        if not parent.children and parent.parent is not None:
            self._leaves[parent] = None
        if node.state is not None:
            self._forget_state(node)
        self._count(node.page, -1, -1)

    def _drop_branch(self) -> bool:
        """Take the least recently used branch out of the tree.

        Returns False if sequences refer to all branches.
        """
        if not any(map(self._is_idle, self._leaves)):
            return False
        node: Node | None = self._oldest_leaf()
        assert node is not None
        used = node.used
        while node in self._leaves and node.used <= used and self._is_idle(node):
            parent = node.parent
            self._drop(node)
            node = parent
        return True

    def _oldest_leaf(self) -> Node:
        return min(filter(self._is_idle, self._leaves), key=lambda leaf: leaf.used)

    def _forget_state(self, node: Node) -> None:
        assert node.state is not None
        self._free_states.append(node.state)
        node.state = None
        del self._stateful[node]

    def _is_idle(self, node: Node) -> bool:
        return self._num_refs[node.page] == self._num_nodes[node.page]

    def _count(self, page: int, refs: int, nodes: int) -> None:
        """Change the numbers of all references and of nodes that refer to a page."""
        num_refs, num_nodes = self._num_refs, self._num_nodes
        was_idle = 0 < num_nodes[page] == num_refs[page]
        num_refs[page] += refs
        num_nodes[page] += nodes
        self._num_idle += (0 < num_nodes[page] == num_refs[page]) - was_idle
        if num_refs[page] == 0:
            self._free.append(page)


def num_pages(num_tokens: int) -> int:
    """Return the number of pages of so many tokens."""
    return -(-num_tokens // PAGE)


def _bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int64).tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Return the number of leading bytes, in whole tokens, that are equal."""
    low, high = 0, min(len(a), len(b)) // _TOKEN
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[: middle * _TOKEN] == b[: middle * _TOKEN] else (low, middle - 1)
    return low * _TOKEN
