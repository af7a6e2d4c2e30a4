"""Which prefill has computed which beginnings of prompts, as a decode group has seen it.

The map is a guess. A prefill also serves others and forgets what it has not used for long, and says what it had only
with a prompt that is done: where that is less than was thought, what this group used longer ago than the first missing
page is taken for forgotten, too. A wrong guess costs time at a prefill, and nothing else.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specdec.dcp.prefix_tree import prefix_keys

_DIGEST_BYTES = 16
_MOST_PAGES = 1 << 17  # 8 million tokens in pages of 64; about 25 MB for each prefill


@dataclass(slots=True)
class _Computed:
    """What a process is thought to have: digests of prefixes, the longest unused first."""

    epoch: str
    digests: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class PrefixMap:
    """Remembers what each prefill has computed for this group. Not thread-safe.

    Args:
        page_size: Tokens of a page.
        most_pages: Pages to remember of each prefill.
    """

    def __init__(self, page_size: int, *, most_pages: int = _MOST_PAGES) -> None:
        self._page_size = page_size
        self._most_pages = most_pages
        self._computed: dict[str, _Computed] = {}

    def digests(self, token_ids: npt.NDArray[np.int64], *, salt: bytes) -> list[bytes]:
        """Give a digest for each page of a prompt that can be shared, of the prompt up to there."""
        digests, before = [], b""
        for key in prefix_keys(token_ids, self._page_size, salt=salt):
            before = hashlib.blake2b(before + key, digest_size=_DIGEST_BYTES).digest()
            digests.append(before)
        return digests

    def num_tokens(self, address: str, epoch: str | None, digests: list[bytes]) -> int:
        """Count the leading tokens of a prompt that a prefill is thought to have.

        Args:
            address: Of the prefill.
            epoch: Of its process now; an earlier one has taken its pages with it.
            digests: Of the prompt.
        """
        computed = self._computed.get(address)
        if computed is None or computed.epoch != epoch:
            return 0
        num_pages = 0
        while num_pages < len(digests) and digests[num_pages] in computed.digests:
            num_pages += 1
        return num_pages * self._page_size

    def num_pages(self, address: str) -> int:
        """Count the pages that are remembered of a prefill."""
        computed = self._computed.get(address)
        return 0 if computed is None else len(computed.digests)

    def note(self, address: str, epoch: str, digests: list[bytes], *, num_found: int) -> None:
        """Note that a prefill has computed a prompt.

        Args:
            address: Of the prefill.
            epoch: Of the process that has.
            digests: Of the prompt.
            num_found: Leading tokens that it had already.
        """
        computed = self._computed.get(address)
        if computed is None or computed.epoch != epoch:
            computed = self._computed[address] = _Computed(epoch)
        known = computed.digests
        num_pages = num_found // self._page_size
        if num_pages < len(digests):
            while digests[num_pages] in known:  # it should have been there
                known.popitem(last=False)
        for digest in reversed(digests):  # the beginning last: a page is worth nothing without those before it
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._most_pages:
            known.popitem(last=False)
