"""Stop strings against a search of the whole text, character by character."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.sampling.stop_strings import StopMatcher

texts = st.text(alphabet="ab", max_size=14)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3, unique=True)


def search(text: str, stops: list[str], *, after: int = 0) -> tuple[str, str | None]:
    """Text before the first stop completed behind character `after`, and that stop; the longest if several are."""
    for end in range(after + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(borders)]


def run(pieces: list[str], stops: list[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown = ""
    for piece in pieces:
        match = matcher.push(piece)
        shown += match.visible
        if match.stop is not None:
            return shown, match.stop
    return shown + matcher.finish(), None


@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 20), max_size=6))
def test_the_first_stop_to_be_completed_ends_the_text_wherever_it_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    before, stop = search(text, stops)
    assert run(pieces_of(text, cuts), stops) == (before, stop)
    assert run(pieces_of(text, cuts), stops, include_stop=True) == (before + (stop or ""), stop)


@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 20), max_size=6))
def test_text_is_shown_as_soon_as_it_cannot_begin_a_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops, include_stop=False)
    seen = shown = ""
    for piece in pieces_of(text, cuts):
        match = matcher.push(piece)
        seen, shown = seen + piece, shown + match.visible
        if match.stop is not None:
            return
        beginnings = [n for stop in stops for n in range(len(stop)) if n and seen.endswith(stop[:n])]
        assert shown == seen[: len(seen) - max(beginnings, default=0)]


@given(text=texts, stops=stop_lists, free=st.integers(0, 6))
def test_a_stop_completed_too_early_is_ordinary_text(text: str, stops: list[str], free: int) -> None:
    matcher = StopMatcher(stops, include_stop=False)
    shown, found = "", None
    for index, character in enumerate(text):
        match = matcher.push(character, may_stop=index >= free)
        shown += match.visible
        if match.stop is not None:
            found = match.stop
            break
    else:
        shown += matcher.finish()
    # What was completed in the free part may already have been shown; only the place of the end is compared.
    before, stop = search(text, stops, after=free)
    assert found == stop
    assert shown.startswith(before) if stop else shown == text


@pytest.mark.parametrize("length", range(1, 7))
def test_a_stop_is_found_at_every_offset_of_one_long_piece(length: int) -> None:
    text = "the quick brown fox"
    for start in range(len(text) - length + 1):
        stop = text[start : start + length]
        assert run([text], [stop]) == (text[: text.index(stop)], stop)


def test_a_repeated_beginning_is_not_lost() -> None:
    assert run(["aaaaab"], ["aab"]) == ("aaa", "aab")
    assert run(list("ababac"), ["abac"]) == ("ab", "abac")


def test_without_stops_everything_is_shown_at_once() -> None:
    assert StopMatcher([], include_stop=False).push("abc").visible == "abc"
