"""From a grammar to the progress of a reply in it, for the vocabulary and the markup of one checkpoint."""

from collections.abc import Collection, Sequence

import numpy as np

from specdec.errors import RequestError
from specdec.grammar.grammar import Grammar
from specdec.grammar.llguidance import Stretch, Vocabulary
from specdec.grammar.progress import GrammarProgress
from specdec.replies.reply_markup import Marker, ReplyMarkup


class GrammarCompiler:
    """Compiles grammars; may be used from any thread, and lets others run meanwhile.

    Args:
        markup: The checkpoint's, with its tokenizer.
        vocab_size: Of the model; ids beyond the tokenizer's are never allowed.
    """

    def __init__(self, markup: ReplyMarkup, *, vocab_size: int) -> None:
        tokenizer = markup.tokenizer
        self._markup = markup
        self._vocabulary = Vocabulary(
            [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
            marker_ids=[token_id for token_id in tokenizer.added_token_ids if token_id < vocab_size],
        )

    def begin(self, grammar: Grammar, *, prompt_ids: Sequence[int], end_ids: Collection[int]) -> GrammarProgress:
        """Compile a grammar for a reply that has no token yet: a millisecond as a rule, a second for the largest.

        Args:
            grammar: What the reply must be.
            prompt_ids: What it follows; tells whether it begins inside the reasoning.
            end_ids: Ids that end its text.

        Raises:
            RequestError: The grammar cannot be followed with this vocabulary, or nothing could end the text.
        """
        if not end_ids:
            raise _refused("needs an id that ends the text, and the checkpoint names none: give stop_token_ids")
        matcher = self._vocabulary.matcher(grammar.definition())
        if matcher.fault is None:  # whether anything can come first
            first_1W = np.zeros((1, self._vocabulary.num_words), dtype=np.uint32)
            self._vocabulary.fill([Stretch(matcher, 0, ())], first_1W)
        if matcher.fault is not None:
            raise _refused(f"{grammar.kind} cannot be followed: {matcher.fault}")
        is_reasoning = grammar.begins_after_reasoning and self._markup.starts_in_reasoning(prompt_ids)
        ids = self._markup.id_by_marker
        return GrammarProgress(
            matcher,
            end_ids=end_ids,
            reasoning_end_id=ids[Marker.END_THINK] if is_reasoning else None,
            foreign_ids=[ids[Marker.CALL]] if Marker.CALL in ids else [],
        )


def _refused(rule: str) -> RequestError:
    return RequestError(f"grammar: {rule}", parameter="grammar")
