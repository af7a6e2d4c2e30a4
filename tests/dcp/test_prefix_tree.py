"""Shared pages against an oracle that keeps every prefix as a tuple of its tokens."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.dcp.allocator import PageAllocator
from specdec.dcp.prefix_tree import PrefixTree

PAGE_SIZES = st.sampled_from([1, 2, 4])
DCP_SIZES = st.integers(1, 8)
TOKENS = st.lists(st.integers(0, 1), max_size=17)
SALTS = st.sampled_from([b"", b"one", b"other"])


@dataclass
class Oracle:
    """Prefixes of (j + 1) * page_size + 1 tokens, each with the page of its last whole page of tokens."""

    page_size: int
    pages: dict[tuple[int, ...], int] = field(default_factory=dict)
    last_use: dict[tuple[int, ...], int] = field(default_factory=dict)
    clock: int = 0

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[: end + 1]) for end in range(self.page_size, len(tokens), self.page_size)]

    def use(self, prefixes: list[tuple[int, ...]]) -> None:
        self.clock += 1
        self.last_use.update(dict.fromkeys(prefixes, self.clock))

    def match(self, tokens: list[int]) -> list[int]:
        known = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.pages:
                break
            known.append(prefix)
        self.use(known)
        return [self.pages[prefix] for prefix in known]

    def insert(self, tokens: list[int], page_ids: list[int], num_refreshed: int) -> int:
        complete = [
            (prefix, page_id)
            for j, (prefix, page_id) in enumerate(zip(self.prefixes(tokens), page_ids, strict=False))
            if self.page_size * (j + 1) <= num_refreshed
        ]
        num_known = len(self.pages)
        for prefix, page_id in complete:
            self.pages.setdefault(prefix, page_id)
        self.use([prefix for prefix, _ in complete])
        return len(self.pages) - num_known

    def next_evicted(self, allocator: PageAllocator) -> tuple[int, ...] | None:
        leaves = [
            prefix
            for prefix, page_id in self.pages.items()
            if allocator.num_holders(page_id) == 1
            and not any(other[: len(prefix)] == prefix for other in self.pages if other != prefix)
        ]
        return min(leaves, key=lambda prefix: self.last_use[prefix], default=None)


def make_tree(page_size: int, *, num_pages: int = 64, dcp_size: int = 1) -> tuple[PrefixTree, PageAllocator]:
    allocator = PageAllocator(num_pages, dcp_size)
    return PrefixTree(allocator, page_size), allocator


def add(tree: PrefixTree, allocator: PageAllocator, tokens: list[int], page_size: int) -> list[int]:
    """Insert all pages of a finished request, whose own hold ends."""
    page_ids = allocator.allocate(-(-len(tokens) // page_size))
    tree.insert(tokens, page_ids, num_refreshed=len(tokens) - 1)
    allocator.release(page_ids)
    return page_ids


@settings(max_examples=200)
@given(page_size=PAGE_SIZES, dcp_size=DCP_SIZES, data=st.data())
def test_any_sequence_of_calls_agrees_with_the_oracle(page_size: int, dcp_size: int, data: st.DataObject) -> None:
    tree, allocator = make_tree(page_size, num_pages=200, dcp_size=dcp_size)
    oracle = Oracle(page_size)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 15))):
        action = data.draw(st.sampled_from(["match", "insert", "evict", "release"]))
        if action == "match":
            tokens = data.draw(TOKENS)
            page_ids = tree.match(tokens)
            assert page_ids == oracle.match(tokens)
            held.append(page_ids)
        elif action == "insert":
            tokens = data.draw(TOKENS)
            page_ids = allocator.allocate(-(-len(tokens) // page_size))
            num_refreshed = data.draw(st.integers(0, len(tokens)))
            num_new = tree.insert(tokens, page_ids, num_refreshed)
            assert num_new == oracle.insert(tokens, page_ids, num_refreshed)
            held.append(page_ids)
        elif action == "evict":
            for _ in range(data.draw(st.integers(1, 4))):
                evicted = oracle.next_evicted(allocator)
                assert tree.evict(1) == (evicted is not None)
                if evicted is not None:
                    assert allocator.num_holders(oracle.pages.pop(evicted)) == 0
        elif held:
            allocator.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        assert tree.num_pages == len(oracle.pages)
    for page_ids in held:
        allocator.release(page_ids)
    assert allocator.num_free == allocator.num_pages - tree.num_pages
    assert tree.evict(allocator.num_pages) == len(oracle.pages)
    assert tree.num_pages == 0
    assert allocator.num_free == allocator.num_pages


@given(
    prompts=st.lists(st.tuples(TOKENS, st.integers(0, 17)), max_size=8),
    page_size=PAGE_SIZES,
    dcp_size=st.integers(2, 8),
)
def test_hits_do_not_depend_on_the_number_of_ranks(
    prompts: list[tuple[list[int], int]], page_size: int, dcp_size: int
) -> None:
    hits: list[list[int]] = []
    for size in (1, dcp_size):
        tree, allocator = make_tree(page_size, num_pages=160, dcp_size=size)
        hits.append([])
        for tokens, num_refreshed in prompts:
            hit = tree.match(tokens)
            hits[-1].append(len(hit))
            num_missing = -(-len(tokens) // page_size) - len(hit)
            page_ids = hit + allocator.allocate(num_missing, after=hit[-1] if hit else None)
            tree.insert(tokens, page_ids, num_refreshed)
            allocator.release(page_ids)
    assert hits[0] == hits[1]


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), page_size=PAGE_SIZES)
def test_a_repeated_prompt_hits_all_whole_pages_before_its_last_token(tokens: list[int], page_size: int) -> None:
    tree, allocator = make_tree(page_size)
    page_ids = add(tree, allocator, tokens, page_size)
    assert tree.match(tokens) == page_ids[: (len(tokens) - 1) // page_size]


@given(
    prompts=st.lists(st.tuples(TOKENS, SALTS, st.booleans()), max_size=12),
    page_size=PAGE_SIZES,
)
def test_salts_are_as_far_apart_as_two_trees(prompts: list[tuple[list[int], bytes, bool]], page_size: int) -> None:
    """A tenant finds what was inserted with its own salt, whatever others have inserted."""
    together, allocator = make_tree(page_size, num_pages=400)
    apart = {salt: make_tree(page_size, num_pages=400) for salt in (b"", b"one", b"other")}
    page_of: dict[bytes, dict[int, int]] = {salt: {} for salt in apart}  # by salt: in its own tree, in the common one
    for tokens, salt, is_inserted in prompts:
        own_tree, own_allocator = apart[salt]
        if is_inserted:
            num_pages = -(-len(tokens) // page_size)
            page_ids, own_ids = allocator.allocate(num_pages), own_allocator.allocate(num_pages)
            num_new = together.insert(tokens, page_ids, len(tokens), salt=salt)
            assert num_new == own_tree.insert(tokens, own_ids, len(tokens))
            page_of[salt].update(zip(own_ids, page_ids, strict=True))
        assert together.match(tokens, salt=salt) == [page_of[salt][each] for each in own_tree.match(tokens)]
    assert together.num_pages == sum(tree.num_pages for tree, _ in apart.values())


def test_a_salt_is_no_part_of_the_tokens() -> None:
    tree, allocator = make_tree(1)
    page_ids = allocator.allocate(2)
    tree.insert([1, 2, 3], page_ids, num_refreshed=2, salt=np.array([4]).tobytes())
    for tokens in ([1, 2, 3], [1, 2, 4], [1, 4, 2, 3], [4, 1, 2, 3]):
        assert tree.match(tokens) == []


def test_a_page_matches_only_with_the_token_after_it() -> None:
    tree, allocator = make_tree(4)
    first, _ = add(tree, allocator, [1, 2, 3, 4, 5], 4)
    assert tree.match([1, 2, 3, 4]) == []  # the token after the page is not known yet
    assert tree.match([1, 2, 3, 4, 6]) == []
    assert tree.match([1, 2, 3, 4, 5]) == [first]
    assert tree.match([1, 2, 3, 4, 5, 6]) == [first]


def test_pages_of_equal_tokens_before_different_ones_are_both_kept() -> None:
    tree, allocator = make_tree(2)
    one = add(tree, allocator, [1, 2, 3], 2)
    other = add(tree, allocator, [1, 2, 4], 2)
    assert tree.match([1, 2, 3]) == one[:1]
    assert tree.match([1, 2, 4]) == other[:1]


def test_the_same_page_of_tokens_after_another_prefix_is_another_page() -> None:
    tree, allocator = make_tree(2)
    add(tree, allocator, [1, 2, 7, 7, 7], 2)
    assert tree.match([3, 2, 7, 7, 7]) == []
    assert tree.match([7, 7, 7]) == []


@pytest.mark.parametrize(("num_refreshed", "num_inserted"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2)])
def test_a_page_enters_once_all_its_draft_rows_are_refreshed(num_refreshed: int, num_inserted: int) -> None:
    tree, allocator = make_tree(4)
    tokens = list(range(10))
    page_ids = allocator.allocate(3)
    assert tree.insert(tokens, page_ids, num_refreshed) == num_inserted
    assert tree.match(tokens) == page_ids[:num_inserted]


def test_a_page_whose_next_token_is_unknown_stays_out() -> None:
    tree, allocator = make_tree(4)
    page_ids = allocator.allocate(2)
    assert tree.insert(list(range(8)), page_ids, num_refreshed=8) == 1
    assert tree.insert(list(range(9)), page_ids, num_refreshed=8) == 1


def test_a_page_known_already_keeps_its_id_and_the_copy_stays_the_callers() -> None:
    tree, allocator = make_tree(2)
    tokens = [1, 2, 3, 4, 5]
    first = add(tree, allocator, tokens[:3], 2)
    copies = allocator.allocate(3)
    assert tree.insert(tokens, copies, num_refreshed=4) == 1
    assert allocator.num_holders(copies[0]) == 1
    assert tree.match(tokens) == [first[0], copies[1]]


def test_matched_pages_survive_eviction_until_they_are_released() -> None:
    tree, allocator = make_tree(2)
    tokens = [1, 2, 3, 4, 5]
    page_ids = add(tree, allocator, tokens, 2)[:2]
    assert tree.match(tokens[:3]) == page_ids[:1]
    assert tree.evict(2) == 1
    assert allocator.num_holders(page_ids[0]) == 2
    assert allocator.num_holders(page_ids[1]) == 0
    allocator.release(page_ids[:1])
    assert tree.evict(2) == 1
    assert allocator.num_free == allocator.num_pages


def test_the_longest_unused_prefix_goes_first_and_its_end_before_its_start() -> None:
    tree, allocator = make_tree(1)
    old = add(tree, allocator, [1, 2, 3], 1)
    new = add(tree, allocator, [4, 5, 6], 1)
    allocator.release(tree.match([1, 2, 3]))  # used again: `new` is now the older one
    evicted = []
    for _ in range(4):
        assert tree.evict(1) == 1
        evicted.append(next(i for i in old[:2] + new[:2] if i not in evicted and allocator.num_holders(i) == 0))
    assert evicted == [new[1], new[0], old[1], old[0]]
    assert tree.evict(1) == 0


def test_a_prefix_used_very_often_is_still_the_newest_once() -> None:
    tree, allocator = make_tree(1)
    often, once = add(tree, allocator, [1, 1], 1)[0], add(tree, allocator, [2, 2], 1)[0]
    for _ in range(5000):
        allocator.release(tree.match([1, 1]))
    allocator.release(tree.match([2, 2]))
    allocator.release(tree.match([1, 1]))
    assert tree.evict(1) == 1
    assert (allocator.num_holders(often), allocator.num_holders(once)) == (1, 0)


def test_eviction_stops_at_the_number_asked_for() -> None:
    tree, allocator = make_tree(1)
    add(tree, allocator, [1, 2, 3, 4], 1)
    assert tree.evict(0) == 0
    assert tree.evict(2) == 2
    assert tree.num_pages == 1


def test_a_refused_insert_leaves_the_tree_as_it_was() -> None:
    tree, allocator = make_tree(1)
    (page_id,) = allocator.allocate(1)
    with pytest.raises(ValueError, match="free"):
        tree.insert([1, 2, 3], [page_id, page_id + 1], num_refreshed=2)
    assert tree.num_pages == 0
    assert allocator.num_holders(page_id) == 1


def test_arrays_of_any_integer_type_match_lists() -> None:
    tree, allocator = make_tree(2)
    (page_id, _) = add(tree, allocator, [1, 2, 3], 2)
    assert tree.match(np.array([1, 2, 3, 4])) == [page_id]
    assert tree.match(np.array([1, 2, 3, 4], dtype=np.int32)) == [page_id]
    assert tree.match(np.array([1, 0, 2, 0, 3, 0])[::2]) == [page_id]
    assert tree.match([]) == tree.match(np.zeros(0, dtype=np.int64)) == []


def test_a_prefix_of_two_thousand_pages_is_found_and_evicted() -> None:
    tree, allocator = make_tree(1, num_pages=2001)
    tokens = np.arange(2001)
    page_ids = allocator.allocate(2000)
    assert tree.insert(tokens, page_ids, num_refreshed=2000) == 2000
    allocator.release(page_ids)
    allocator.release(tree.match(tokens))
    assert tree.evict(500) == 500
    assert tree.match(tokens) == page_ids[:1500]
    assert tree.evict(1500) == 0
    allocator.release(page_ids[:1500])
    assert tree.evict(1501) == 1500
    assert allocator.num_free == allocator.num_pages
