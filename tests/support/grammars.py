"""Grammars for tests, a vocabulary that spells every text in many ways, and what a grammar allows by definition."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import numpy as np
import numpy.typing as npt

from specdec.grammar.llguidance import Matcher, Stretch, Vocabulary, is_allowed

# An object, an enum and an array of integers; bounded, so that a model without a clue ends it before long.
FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sky": {"enum": ["clear", "cloudy"]},
        "degrees": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 49}, "maxItems": 3},
    },
    "required": ["sky", "degrees"],
    "additionalProperties": False,
}
SCHEMAS: tuple[Any, ...] = (
    FORECAST,
    {"type": "object"},
    True,
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
    {"type": "object", "properties": {"ab": {"type": "string"}, "c": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}},
    {"type": "string", "pattern": "^(ab|a)*c?$"},
    {"enum": ["ab", "abc", 1, 12, None]},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 100},
    {"type": "string", "minLength": 2, "maxLength": 3},
)

PIECES = (*(bytes([value]) for value in range(256)), b'{"', b'":', b'",', b'": ', b"true", b"null", b'"}', b"]}", b"ab")
PIECES += (b"cl", b"clear", b'a":', b"1,", b"12", b"  ", b"\n ", "é".encode(), "日".encode()[:2], b"")
MARKER_IDS = (len(PIECES), len(PIECES) + 1)
VOCAB_SIZE = len(PIECES) + len(MARKER_IDS)


@functools.cache
def vocabulary() -> Vocabulary:
    """Bytes, a few longer pieces of JSON, an id without a text, and two markers, which read like text."""
    return Vocabulary([*PIECES, b"a", b"{"], marker_ids=MARKER_IDS)


def allowed(matcher: Matcher, draft_ids: Sequence[int] = ()) -> npt.NDArray[np.bool_]:
    """What may come next after each beginning of the drafts, bool [1 + drafts, V + 1]; the last id is the end."""
    word_RW = np.zeros((len(draft_ids) + 1, matcher.vocabulary.num_words), dtype=np.uint32)
    matcher.vocabulary.fill([Stretch(matcher, 0, draft_ids)], word_RW)
    size = matcher.vocabulary.end_id + 1
    return np.array([[is_allowed(word_W, token_id) for token_id in range(size)] for word_W in word_RW])


def is_valid(schema: Any, text: str) -> bool:
    """Whether a text is JSON that a schema describes, by another library."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return jsonschema_rs.is_valid(schema, value)
