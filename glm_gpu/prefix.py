"""Cached pages found again by the tokens they hold, so that a prompt's known beginning is not computed twice."""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from glm_gpu.arrays import common_length
from glm_gpu.pages import PagePool


@dataclass(frozen=True)
class Match:
    """The cached beginning of a prompt: whole pages, and perhaps the first rows of one more."""

    pages: list[int]
    tail: tuple[int, int] | None
    num_tokens: int


@dataclass(eq=False)
class _Node:
    """A page behind the pages on the way from the root; fewer ids than a page holds only where nothing follows."""

    ids: np.ndarray
    page: int
    parent: "_Node | None"
    last_use: int = 0
    children: "dict[bytes, _Node]" = field(default_factory=dict)


class PrefixTree:
    """The pages of past and running sequences, by token; forgets the least recently used ones when asked for room.

    The tree is a user of every page in it. It never hands out a row beyond those it was told of, so a sequence may go
    on writing behind them in the same page. Not safe for several threads.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root = _Node(np.empty(0, np.int32), -1, None)
        self._clock = itertools.count(1)
        self.num_pages = 0

    def match(self, ids: Sequence[int]) -> Match:
        """The longest cached beginning of `ids`. The caller takes the pages over before anything else is called."""
        wanted = np.asarray(ids, np.int32)
        node, pages, at = self._root, [], 0
        while child := node.children.get(wanted[at : at + self._pool.page_tokens].tobytes()):
            if len(child.ids) < self._pool.page_tokens:
                break
            node, at = self._touch(child), at + self._pool.page_tokens
            pages.append(node.page)
        best, num_rows = None, 0
        for child in node.children.values():
            common = common_length(child.ids, wanted[at:])
            if common > num_rows:
                best, num_rows = child, common
        if best is None:
            return Match(pages, None, at)
        return Match(pages, (self._touch(best).page, num_rows), at + num_rows)

    def insert(self, ids: Sequence[int], pages: Sequence[int]) -> None:
        """Remember the pages that hold `ids`; where the same tokens are known already, the known page stays."""
        known, node = np.asarray(ids, np.int32), self._root
        for at, page in zip(range(0, len(known), self._pool.page_tokens), pages, strict=False):
            part = known[at : at + self._pool.page_tokens]
            child = node.children.get(part.tobytes())
            if child is None:
                if len(part) < self._pool.page_tokens and _is_covered(part, node):
                    return
                self._drop_beginnings(part, node)
                child = node.children[part.tobytes()] = _Node(part, page, node)
                self._pool.retain(page)
                self.num_pages += 1
            node = self._touch(child)

    def evict(self, num_pages: int) -> int:
        """Forget least recently used pages that nobody else uses: how many became free, `num_pages` if it can be."""
        leaves = [(n.last_use, id(n), n) for n in self._nodes() if not n.children and self._is_unused(n)]
        heapq.heapify(leaves)
        num_freed = 0
        while leaves and num_freed < num_pages:
            node = heapq.heappop(leaves)[2]
            parent = node.parent
            self._remove(node)
            num_freed += 1
            if parent is not self._root and not parent.children and self._is_unused(parent):
                heapq.heappush(leaves, (parent.last_use, id(parent), parent))
        return num_freed

    def sequences(self) -> list[tuple[list[int], list[int]]]:
        """Each remembered sequence that is the beginning of no other: (ids, pages), the most recently used first."""
        found = []
        for leaf in sorted((n for n in self._nodes() if not n.children), key=lambda n: -n.last_use):
            path, node = [], leaf
            while node.parent is not None:
                path.append(node)
                node = node.parent
            path.reverse()
            found.append(([i for n in path for i in n.ids.tolist()], [n.page for n in path]))
        return found

    def clear(self) -> None:
        """Forget everything."""
        for node in self._nodes():
            self._pool.release(node.page)
        self._root.children.clear()
        self.num_pages = 0

    def _touch(self, node: _Node) -> _Node:
        node.last_use = next(self._clock)
        return node

    def _nodes(self) -> list[_Node]:
        nodes = list(self._root.children.values())
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes

    def _is_unused(self, node: _Node) -> bool:
        return self._pool.references(node.page) == 1

    def _remove(self, node: _Node) -> None:
        del node.parent.children[node.ids.tobytes()]
        self._pool.release(node.page)
        self.num_pages -= 1

    def _drop_beginnings(self, part: np.ndarray, node: _Node) -> None:
        """Forget siblings that `part` begins with."""
        for child in list(node.children.values()):
            if len(child.ids) < len(part) and np.array_equal(child.ids, part[: len(child.ids)]):
                self._remove(child)


def _is_covered(part: np.ndarray, node: _Node) -> bool:
    return any(np.array_equal(child.ids[: len(part)], part) for child in node.children.values())
