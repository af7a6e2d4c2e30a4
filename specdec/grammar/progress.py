"""How far one reply has come: inside the reasoning, inside its grammar, or past the end of its text.

    free ... </think> constrained ... end
                     ^ the grammar's first token

The reasoning is free, but it must end before the text may: ids that end a text are allowed exactly where the grammar
may end, and in the reasoning it has not begun. A stretch of drafts may pass from one part into the next anywhere.
"""

from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import NamedTuple

from specdec.grammar.llguidance import Matcher


class _Part(Enum):
    REASONING = auto()
    GRAMMAR = auto()
    ENDED = auto()


class RowParts(NamedTuple):
    """The rows of one verify by the part of the reply that each of them draws for, in this order.

    Attributes:
        num_reasoning: Rows inside the reasoning.
        num_grammar: Rows inside the grammar: one, and one more for each of `draft_ids`.
        num_ended: Rows behind the end of the text.
        draft_ids: Drafts that the grammar judges.
    """

    num_reasoning: int
    num_grammar: int
    num_ended: int
    draft_ids: Sequence[int]


class GrammarProgress:
    """The place of one reply.

    Args:
        matcher: At the beginning of the grammar.
        end_ids: Ids that end the text, whether or not the reply stops at them.
        reasoning_end_id: The id after which the grammar begins; None where it begins at once.
        foreign_ids: Ids that the reasoning must not hold either, since readers of the reply take it to end there.

    Attributes:
        matcher: Where the text stands in the grammar.
        end_ids: Ids that end the text.
        early_ids: Ids that the reasoning must not hold.
    """

    def __init__(
        self,
        matcher: Matcher,
        *,
        end_ids: Collection[int],
        reasoning_end_id: int | None,
        foreign_ids: Collection[int] = (),
    ) -> None:
        self.matcher = matcher
        self.end_ids = frozenset(end_ids)
        self.early_ids = (self.end_ids | set(foreign_ids)) - {reasoning_end_id}
        self._foreign_ids = foreign_ids
        self._reasoning_end_id = reasoning_end_id
        self._part = _Part.GRAMMAR if reasoning_end_id is None else _Part.REASONING

    def restart(self) -> "GrammarProgress":
        """Give the progress of another reply to the same prompt, which has no token yet."""
        return GrammarProgress(
            self.matcher.restart(),
            end_ids=self.end_ids,
            reasoning_end_id=self._reasoning_end_id,
            foreign_ids=self._foreign_ids,
        )

    def observe(self, token_ids: Sequence[int]) -> None:
        """Take in emitted tokens; every emitted token must pass here once."""
        parts = self.parts_of(token_ids)
        self.matcher.consume(parts.draft_ids)
        if parts.num_ended:
            self._part = _Part.ENDED
        elif parts.num_grammar:
            self._part = _Part.GRAMMAR

    def parts_of(self, draft_ids: Sequence[int]) -> RowParts:
        """Tell which part of the reply each row draws for: now, and after each of the drafts."""
        num_reasoning, part = 0, self._part
        if part is _Part.REASONING:
            if self._reasoning_end_id not in draft_ids:
                return RowParts(len(draft_ids) + 1, 0, 0, ())
            num_reasoning = draft_ids.index(self._reasoning_end_id) + 1
        rest = draft_ids[num_reasoning:]
        if part is _Part.ENDED:
            return RowParts(0, 0, len(rest) + 1, ())
        num_judged = next((place for place, token_id in enumerate(rest) if token_id in self.end_ids), len(rest))
        return RowParts(num_reasoning, num_judged + 1, len(rest) - num_judged, rest[:num_judged])
