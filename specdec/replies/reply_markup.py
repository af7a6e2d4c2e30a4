"""The markup of a reply: which tokens of a checkpoint are markers, and where in it a reply begins.

    reasoning</think>text<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>

A marker is a token, never a text: `</think>` that a model spells out of ordinary tokens is ordinary text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from specdec.text.tokenizer import Tokenizer


class Marker(Enum):
    """What a token of the markup means; the value is the token, and how it reads where it has no meaning."""

    THINK = "<think>"
    END_THINK = "</think>"
    CALL = "<tool_call>"
    END_CALL = "</tool_call>"
    KEY = "<arg_key>"
    END_KEY = "</arg_key>"
    VALUE = "<arg_value>"
    END_VALUE = "</arg_value>"
    SPECIAL = ""  # any other special token, such as one that ends the turn: never shown


THINK_MARKERS = frozenset({Marker.THINK, Marker.END_THINK})
CALL_MARKERS = frozenset(Marker) - THINK_MARKERS - {Marker.SPECIAL}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyMarkup:
    """The marker tokens of one checkpoint.

    Attributes:
        tokenizer: The checkpoint's.
        id_by_marker: Ids of the markers that it has; those of reasoning, and those of calls, are there all or none.
        marker_by_id: The same the other way round, and `Marker.SPECIAL` for ids that are never shown.
    """

    tokenizer: Tokenizer
    id_by_marker: Mapping[Marker, int]
    marker_by_id: Mapping[int, Marker]

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, end_ids: Sequence[int] = ()) -> "ReplyMarkup":
        """Find the markers of a checkpoint; one that lacks them gives replies of plain text.

        Args:
            tokenizer: The checkpoint's.
            end_ids: Ids that end a turn, which may not all be marked as special.
        """
        id_by_marker: dict[Marker, int] = {}
        for group in (THINK_MARKERS, CALL_MARKERS):
            found = {marker: tokenizer.token_id(marker.value) for marker in group}
            if None not in found.values():
                id_by_marker.update({marker: token_id for marker, token_id in found.items() if token_id is not None})
        marker_by_id = dict.fromkeys((*tokenizer.special_token_ids, *end_ids), Marker.SPECIAL)
        marker_by_id |= {token_id: marker for marker, token_id in id_by_marker.items()}
        return cls(tokenizer=tokenizer, id_by_marker=id_by_marker, marker_by_id=marker_by_id)

    @property
    def has_reasoning(self) -> bool:
        """Whether a reply can be told apart into reasoning and the rest."""
        return Marker.END_THINK in self.id_by_marker

    @property
    def has_tool_calls(self) -> bool:
        """Whether a reply can hold tool calls."""
        return Marker.CALL in self.id_by_marker

    def starts_in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Say whether a prompt leaves its reply inside the reasoning.

        The last think marker behind the last role token decides: a template may open the reasoning, close it, or do
        neither, whatever the version of the model.

        Args:
            prompt_ids: The rendered prompt.
        """
        for token_id in reversed(prompt_ids):
            marker = self.marker_by_id.get(token_id)
            if marker in THINK_MARKERS:
                return marker is Marker.THINK
            if marker is Marker.SPECIAL:
                return False
        return False
