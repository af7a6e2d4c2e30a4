"""What may come next, against two definitions: texts that are read whole, and matchers that are built anew."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.grammar.definition import json_schema_definition, regex_definition
from specdec.grammar.llguidance import Matcher, Stretch
from tests.support.grammars import MARKER_IDS, PIECES, SCHEMAS, VOCAB_SIZE, allowed, is_valid, vocabulary


def matcher_of(schema: Any) -> Matcher:
    matcher = vocabulary().matcher(json_schema_definition(json.dumps(schema)))
    assert matcher.fault is None
    return matcher


def regex_matcher(pattern: str) -> Matcher:
    matcher = vocabulary().matcher(regex_definition(pattern))
    assert matcher.fault is None
    return matcher


def spelled(token_ids: Sequence[int]) -> bytes:
    return b"".join(PIECES[token_id] for token_id in token_ids)


def walk(matcher: Matcher, choices: Sequence[float], *, most: int = 60) -> list[int]:
    """Tokens of one text, each chosen by a number in [0, 1) among those allowed; up to where it may end, if it does."""
    token_ids: list[int] = []
    for choice in choices[:most]:
        (allowed_V,) = allowed(matcher)
        if allowed_V[-1]:
            break
        ids = np.flatnonzero(allowed_V)
        token_ids.append(int(ids[int(choice * len(ids))]))
        matcher.consume(token_ids[-1:])
    return token_ids


choices = st.lists(st.floats(0, 1, exclude_max=True), min_size=60, max_size=60)


@settings(max_examples=60)
@given(schema=st.sampled_from(SCHEMAS), choices=choices)
def test_texts_that_may_end_are_what_the_schema_describes(schema: Any, choices: list[float]) -> None:
    matcher = matcher_of(schema)
    token_ids = walk(matcher, choices)
    assert spelled(token_ids)
    if allowed(matcher)[0, -1]:
        assert is_valid(schema, spelled(token_ids).decode())
    assert not set(token_ids) & set(MARKER_IDS)


@pytest.mark.parametrize(
    ("schema", "value", "is_described"),
    [
        ({"type": "object"}, {"a": [1, {"b": None}], "é日": '\u0007\\"/ \U0001f642'}, True),
        ({"type": "integer"}, 3.5, False),
        ({"enum": ["ab", "abc"]}, "abc", True),
        ({"enum": ["ab", "abc"]}, "abcd", False),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, [True, False], True),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, [True, False, True], False),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, None, True),
        ({"type": "string", "format": "date"}, "2024-02-29", True),
        (
            {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
            [[], [[]]],
            True,
        ),
    ],
)
@pytest.mark.parametrize("indent", [None, 1, 4])
def test_every_way_to_spell_a_text_is_allowed(schema: Any, value: Any, is_described: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent).encode()
    rng = np.random.default_rng(0)
    for _ in range(4):
        matcher, place, is_followed = matcher_of(schema), 0, True
        while place < len(text) and is_followed:
            fitting = [i for i, piece in enumerate(PIECES) if piece and text.startswith(piece, place)]
            allowed_V = allowed(matcher)[0]
            # Bytes of one text are followed together or not at all.
            is_followed = any(allowed_V[i] for i in fitting)
            token_id = int(rng.choice([i for i in fitting if allowed_V[i]] or fitting))
            if is_followed:
                matcher.consume([token_id])
            place += len(PIECES[token_id])
        assert (is_followed and allowed(matcher)[0, -1]) == is_described


@settings(max_examples=60)
@given(
    schema=st.sampled_from(SCHEMAS),
    choices=choices,
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=8, max_size=8),
    wrong=st.integers(0, VOCAB_SIZE - 1),
)
def test_drafts_are_looked_at_and_leave_no_trace(
    schema: Any, choices: list[float], lengths: list[tuple[int, int]], wrong: int
) -> None:
    """The state after runs and drafts of all lengths equals the one that is built from the text."""
    text = walk(matcher_of(schema), choices)
    matcher, place = matcher_of(schema), 0
    for num_drafts, num_kept in lengths:
        drafts = [*text[place : place + num_drafts], wrong]
        rebuilt = matcher_of(schema)
        rebuilt.consume(text[:place])
        found = allowed(matcher, drafts)
        for count in range(len(drafts) + 1):
            (expected_V,) = allowed(rebuilt)
            assert (found[count] == expected_V).all()
            if count == len(drafts) or not expected_V[drafts[count]]:
                assert not found[count + 1 :].any()
                break
            rebuilt.consume(drafts[count : count + 1])
        kept = text[place : place + min(num_drafts, num_kept)]
        matcher.consume(kept)
        place += len(kept)


def test_matchers_are_asked_together_and_do_not_mix() -> None:
    patterns = ("a*b", "[0-9]{2}", "x|ab", "(é|日)+")
    together = [regex_matcher(pattern) for pattern in patterns]
    drafts: list[list[int]] = [[ord("a"), ord("b")], [], [264], [262]]
    assert PIECES[264] == b"ab"
    first_rows = np.cumsum([0, *(len(each) + 1 for each in drafts)])
    word_RW = np.zeros((first_rows[-1], vocabulary().num_words), dtype=np.uint32)
    stretches = [Stretch(*each) for each in zip(together, first_rows[:-1].tolist(), drafts, strict=True)]
    vocabulary().fill(stretches, word_RW)
    for pattern, first_row, draft_ids in zip(patterns, first_rows.tolist(), drafts, strict=False):
        alone = np.zeros((len(draft_ids) + 1, vocabulary().num_words), dtype=np.uint32)
        vocabulary().fill([Stretch(regex_matcher(pattern), 0, draft_ids)], alone)
        assert (word_RW[first_row : first_row + len(alone)] == alone).all()


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\/b", "a/b"), ("a\nb", "a\nb"), (r"a\nb", "a\nb"), (r"\\", "\\"), ("a\\\nb", "a\nb")],
)
def test_regular_expressions_may_hold_slashes_and_line_breaks(pattern: str, text: str) -> None:
    matcher = regex_matcher(pattern)
    ids = list(text.encode())
    assert all(allowed(matcher, ids)[place, token_id] for place, token_id in enumerate(ids))
    matcher.consume(ids)
    assert np.flatnonzero(allowed(matcher)[0]).tolist() == [VOCAB_SIZE]


def test_white_space_is_bounded() -> None:
    matcher = matcher_of({"type": "array", "minItems": 1})
    matcher.consume(list(b"["))
    matcher.consume(list(b"\n"))
    num_spaces = 0
    while allowed(matcher)[0, ord(" ")]:
        matcher.consume([ord(" ")])
        num_spaces += 1
    assert num_spaces == 32
    assert not allowed(matcher)[0, [ord("\n"), ord("\t")]].any()


# Nothing can follow the member's name, which a schema may be too long for anybody to see.
DEAD_END = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}, "b": {"type": "null"}}}


def test_dead_end_ahead_of_the_text_is_none_of_the_text() -> None:
    dead_end, way_out = list(b'{"a":'), list(b'{"b":null}')
    matcher = matcher_of(DEAD_END)
    found = allowed(matcher, dead_end)
    assert found[:-1].any(axis=1).all()
    assert not found[-1].any()  # not even the end
    assert matcher.fault is not None
    assert (allowed(matcher, way_out)[:3] == found[:3]).all()
    assert matcher.fault is None
    matcher.consume(way_out[:2])
    assert (allowed(matcher, dead_end[2:]) == found[2:]).all()
    matcher.consume(way_out[2:])
    assert np.flatnonzero(allowed(matcher)[0]).tolist() == [VOCAB_SIZE]


def test_dead_end_at_the_text_allows_nothing_and_says_why() -> None:
    matcher = matcher_of(DEAD_END)
    matcher.consume(list(b'{"a":'))
    assert not allowed(matcher).any()
    assert matcher.fault == "no token goes on with it"
    assert not allowed(matcher, [ord("n")]).any()


def test_lexer_that_has_grown_too_large_allows_nothing_and_says_why() -> None:
    matcher = regex_matcher("(.{1,1000}){1,1000}x")
    while matcher.fault is None:
        (allowed_V,) = allowed(matcher)
        assert allowed_V.any() == (matcher.fault is None)
        matcher.consume([ord("a")])
    assert "lexer error" in matcher.fault
    assert not allowed(matcher, [ord("a")]).any()


def test_restarted_matcher_is_at_the_beginning() -> None:
    matcher = regex_matcher("ab")
    matcher.consume([ord("a")])
    other = matcher.restart()
    assert np.flatnonzero(allowed(other)[0]).tolist() == [ord("a"), PIECES.index(b"ab")]
    assert np.flatnonzero(allowed(matcher)[0]).tolist() == [ord("b")]
