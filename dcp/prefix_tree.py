"""Pages that a new prompt may share because they hold the KV of its first tokens.

Row t of the draft's KV is made of token t + 1 and the target's hidden state at t. So a page of S tokens is right for a
prompt only if its tokens and the one after them are equal: the key of page j is the S + 1 tokens j*S .. (j+1)*S. It
follows that the last token of a prompt is never covered. A node is a page, its children are the pages seen to follow
it. Keys know nothing of ranks, so hits do not depend on how many ranks share a request.

A salt keeps tenants apart, who could otherwise find out by the time to the first token what others have asked. It is
part of the first page's key, so that prompts of different salts have no page in common.
"""

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.dcp.allocator import PageAllocator

_MIN_STALE_ENTRIES = 1024  # stale entries that are not worth a clean-up
_REMOVED = -1

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(slots=True, eq=False)
class _Node:
    page_id: int
    key: bytes
    parent: "_Node | None"
    children: "dict[bytes, _Node]" = field(default_factory=dict)
    last_use: int = 0


def salt_digest(salt: str) -> bytes:
    """Give what stands for a tenant's salt in keys and messages, 16 bytes; a secret is then told to nobody."""
    return hashlib.blake2b(salt.encode("utf-8", errors="surrogatepass"), digest_size=16).digest()


def prefix_keys(token_ids: TokenIds, page_size: int, *, salt: bytes = b"") -> Iterator[bytes]:
    """Keys of the whole pages of a prompt that others may share, each one token longer than its page.

    Args:
        token_ids: The prompt.
        page_size: Tokens of a page.
        salt: Of its tenant; behind the tokens of the first key.
    """
    tokens = np.ascontiguousarray(token_ids, dtype=np.int64)
    content, page_bytes = tokens.tobytes(), page_size * tokens.itemsize
    for first in range(0, len(content) - page_bytes, page_bytes):
        yield content[first : first + page_bytes + tokens.itemsize] + (b"" if first else salt)


class PrefixTree:
    """Prefixes of earlier requests, by content. The tree is one holder of each of its pages; they are never rewritten.

    Not thread-safe.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._roots: dict[bytes, _Node] = {}
        self._num_pages = 0
        self._clock = 0
        # Heap of leaves, oldest use first; entries that a later use overtook stay in it as stale ones.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._num_pushed = 0  # makes entries of one use comparable

    @property
    def num_pages(self) -> int:
        """Pages in the tree."""
        return self._num_pages

    def page_ids(self) -> Iterator[int]:
        """Ids of all pages in the tree."""
        nodes = list(self._roots.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            yield node.page_id

    def match(self, token_ids: TokenIds, *, salt: bytes = b"") -> list[int]:
        """Page ids of the longest known prefix, retained for the caller, who releases them.

        At most (n - 1) // page_size pages for n tokens, because the key of a page has page_size + 1 tokens.

        Args:
            token_ids: The prompt.
            salt: Only what was inserted with the same one is found.
        """
        path = self._walk(prefix_keys(token_ids, self._page_size, salt=salt))
        page_ids = [node.page_id for node in path]
        self._allocator.retain(page_ids)
        self._touch(path)
        return page_ids

    def insert(self, token_ids: TokenIds, page_ids: Sequence[int], num_refreshed: int, *, salt: bytes = b"") -> int:
        """Keep the pages of a request for others; returns how many were new.

        Page j enters only if all its draft rows were made with the target's hidden states (page_size * (j + 1) <=
        num_refreshed) and the token after it is known. Where the tree has a page of the same tokens already, that one
        stays and the caller's copy remains the caller's alone.

        Args:
            token_ids: Known tokens of the request.
            page_ids: Its pages in order, held by the caller.
            num_refreshed: Draft rows 0 .. num_refreshed - 1 are final.
            salt: Of the request.
        """
        num_complete = min(len(page_ids), max(num_refreshed, 0) // self._page_size)
        keys = list(islice(prefix_keys(token_ids, self._page_size, salt=salt), num_complete))
        path = self._walk(keys)
        new_page_ids = page_ids[len(path) : len(keys)]
        self._allocator.retain(new_page_ids)
        for key, page_id in zip(keys[len(path) :], new_page_ids, strict=True):
            parent = path[-1] if path else None
            node = _Node(page_id, key, parent)
            (self._roots if parent is None else parent.children)[key] = node
            path.append(node)
        self._num_pages += len(new_page_ids)
        self._touch(path)
        return len(new_page_ids)

    def evict(self, num_pages: int) -> int:
        """Give back up to `num_pages` pages that only the tree holds, least recently used first; returns how many.

        A page goes only after the pages that follow it: a held page keeps its whole prefix.
        """
        num_evicted = 0
        held = []
        while num_evicted < num_pages and self._leaves:
            entry = heapq.heappop(self._leaves)
            if _is_stale(entry):
                continue
            node = entry[-1]
            if self._allocator.num_holders(node.page_id) > 1:
                held.append(entry)
                continue
            self._remove(node)
            num_evicted += 1
            if node.parent is not None and not node.parent.children:
                self._push_leaf(node.parent)
        for entry in held:
            heapq.heappush(self._leaves, entry)
        return num_evicted

    def _walk(self, keys: Iterable[bytes]) -> list[_Node]:
        """Nodes along the keys from a root on, up to the first unknown one."""
        path = []
        children = self._roots
        for key in keys:
            node = children.get(key)
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def _touch(self, path: list[_Node]) -> None:
        """Mark a path that begins at a root as used now."""
        self._clock += 1
        for node in path:
            node.last_use = self._clock
        if path and not path[-1].children:
            self._push_leaf(path[-1])

    def _push_leaf(self, node: _Node) -> None:
        if len(self._leaves) > 2 * self._num_pages + _MIN_STALE_ENTRIES:
            self._leaves = [entry for entry in self._leaves if not _is_stale(entry)]
            heapq.heapify(self._leaves)
        self._num_pushed += 1
        heapq.heappush(self._leaves, (node.last_use, self._num_pushed, node))

    def _remove(self, node: _Node) -> None:
        siblings = node.parent.children if node.parent is not None else self._roots
        del siblings[node.key]
        node.last_use = _REMOVED
        self._num_pages -= 1
        self._allocator.release((node.page_id,))


def _is_stale(entry: tuple[int, int, _Node]) -> bool:
    """Whether the node of an entry was used since, gained children, or left the tree."""
    last_use, _, node = entry
    return node.last_use != last_use or bool(node.children)
