"""What a prefill is thought to have follows what it has, as far as that is said."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.dcp.allocator import PageAllocator
from specdec.dcp.prefix_tree import PrefixTree
from specdec.handoff.prefix_map import PrefixMap

PAGE_SIZE = 2
HERE, EPOCH = "here:1", "p" * 32
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=13), max_size=20)


def digests(prefixes: PrefixMap, tokens: list[int], *, salt: bytes = b"") -> list[bytes]:
    return prefixes.digests(np.array(tokens), salt=salt)


def test_a_beginning_counts_by_whole_pages_with_the_token_after_them() -> None:
    prefixes = PrefixMap(PAGE_SIZE)
    prefixes.note(HERE, EPOCH, digests(prefixes, [1, 2, 3, 4, 5]), num_found=0)
    for tokens, num_known in (
        ([1, 2, 3, 4, 5, 6, 7], 4),
        ([1, 2, 3, 4, 6], 2),
        ([1, 2, 3], 2),
        ([1, 2, 4], 0),
        ([3, 4, 5], 0),
        ([1, 2], 0),
    ):
        assert prefixes.num_tokens(HERE, EPOCH, digests(prefixes, tokens)) == num_known
    assert prefixes.num_tokens("there:1", EPOCH, digests(prefixes, [1, 2, 3])) == 0
    assert prefixes.num_tokens(HERE, "q" * 32, digests(prefixes, [1, 2, 3])) == 0
    assert prefixes.num_tokens(HERE, EPOCH, digests(prefixes, [1, 2, 3], salt=b"salt")) == 0
    assert prefixes.num_pages(HERE) == 2


def test_what_was_used_longest_ago_is_forgotten_first_and_ends_before_beginnings() -> None:
    prefixes = PrefixMap(PAGE_SIZE, most_pages=3)
    old, new = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]
    for tokens in (old, new):
        prefixes.note(HERE, EPOCH, digests(prefixes, tokens), num_found=0)
    assert prefixes.num_pages(HERE) == 3
    assert prefixes.num_tokens(HERE, EPOCH, digests(prefixes, old)) == 2
    assert prefixes.num_tokens(HERE, EPOCH, digests(prefixes, new)) == 4


def test_a_page_that_is_gone_takes_along_what_was_used_longer_ago() -> None:
    prefixes = PrefixMap(PAGE_SIZE)
    oldest, old, new = ([first, 2, 3, 4, 5] for first in (6, 7, 8))
    for tokens in (oldest, old, new):
        prefixes.note(HERE, EPOCH, digests(prefixes, tokens), num_found=0)
    prefixes.note(HERE, EPOCH, digests(prefixes, old), num_found=2)  # its second page is gone, its first is not
    assert [prefixes.num_tokens(HERE, EPOCH, digests(prefixes, tokens)) for tokens in (oldest, old, new)] == [0, 4, 4]


@given(prompts=PROMPTS, num_pages=st.integers(8, 40))
def test_a_prefill_that_serves_nobody_else_has_what_it_is_thought_to_have(
    prompts: list[list[int]], num_pages: int
) -> None:
    """Its pool may be smaller than what is remembered: then a guess is wrong once, and right from then on."""
    allocator = PageAllocator(num_pages, 1)
    tree, prefixes = PrefixTree(allocator, PAGE_SIZE), PrefixMap(PAGE_SIZE)
    has_evicted = False
    for tokens in prompts:
        known = digests(prefixes, tokens)
        hit = tree.match(tokens)
        num_found = len(hit) * PAGE_SIZE
        num_thought = prefixes.num_tokens(HERE, EPOCH, known)
        assert num_thought == num_found or (has_evicted and num_thought > num_found)
        missing = -(-len(tokens) // PAGE_SIZE) - len(hit)
        if missing > allocator.num_free:
            has_evicted = tree.evict(missing - allocator.num_free) > 0 or has_evicted
        pages = hit + allocator.allocate(missing)
        tree.insert(tokens, pages, num_refreshed=len(tokens) - 1)
        allocator.release(pages)
        prefixes.note(HERE, EPOCH, known, num_found=num_found)
        assert prefixes.num_tokens(HERE, EPOCH, known) == len(known) * PAGE_SIZE
