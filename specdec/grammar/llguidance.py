"""The grammar library, as the engine sees it: what is wrong with a definition, and which tokens may come next.

A `Matcher` reads a text token by token and knows where in its grammar it stands. The rows of a verify are looked at
with the matcher run ahead over the drafts and taken back again.

The library bounds its work. It gives up on a text where nothing can follow, and for good where its lexer has grown too
large. The lexer is one for all matchers of a compiled definition, so every request compiles its own.

Masks are of texts: a token is allowed where some text of the grammar goes on with its bytes, however the checkpoint's
tokenizer would have cut that text. So they depend on nothing but what was written.

V = token ids, W = 32-bit words that hold V + 1 bits, R = rows.
"""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import llguidance as library
import numpy as np
import numpy.typing as npt
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

Uint32Array = npt.NDArray[np.uint32]

# A lexer state takes about 500 bytes and is kept: at most 50 MB for a request, or strings of 16,000 characters whose
# length the grammar counts. The error texts would otherwise show the library's state.
_LIMITS = library.LLParserLimits(max_lexer_states=100_000, verbose_errors=False)
_QUIET = 0
_NO_TOKEN = ("NoExtension", "NoExtensionBias")


def fault_in(definition: str) -> str | None:
    """Say what is wrong with a definition, as far as no vocabulary is needed to know; None where nothing is."""
    is_faulty, messages = library.LLMatcher.validate_grammar_with_warnings(definition, limits=_LIMITS)
    return _without_state(messages[0]) if is_faulty else None


class Vocabulary:
    """The tokens of a checkpoint, prepared for masks: half a second and 65 MB for 155,000 of them.

    Args:
        token_bytes: The bytes of each id; an id without any is never allowed.
        marker_ids: Ids that are no text, whatever their bytes: a grammar names them or does without.

    Attributes:
        end_id: One more than the highest id: its bit says that the text may end here.
        num_words: W.
    """

    def __init__(self, token_bytes: Sequence[bytes], *, marker_ids: Collection[int]) -> None:
        self.end_id = len(token_bytes)
        self.num_words = self.end_id // 32 + 1
        tokens = library.TokenizerWrapper(_Tokens(token_bytes, marker_ids))
        self._tokenizer = library.LLTokenizer(tokens, eos_token=self.end_id)
        self._executor = library.LLExecutor()

    def matcher(self, definition: str) -> "Matcher":
        """Compile a definition; `fault` of what comes back says whether it can be used. Lets other threads run."""
        return Matcher(self, library.LLMatcher(self._tokenizer, definition, log_level=_QUIET, limits=_LIMITS))

    def fill(self, stretches: Sequence["Stretch"], word_RW: Uint32Array) -> None:
        """Write what may come next after each beginning of each stretch, for all matchers at once, on several threads.

        Args:
            stretches: Each with a matcher of its own, which stays where it is.
            word_RW: Zeros. Bit i of word w, counted from the lowest, is set where id 32 * w + i is allowed. Rows behind
                a draft that is not allowed stay as they are.
        """
        words = word_RW.view(np.int32)
        for each in stretches:
            each.matcher.fault = None
        alone = [(each.matcher.now, each.first_row) for each in stretches if not each.draft_ids]
        if alone:
            fill_next_token_bitmask_par(self._executor, alone, words)
        ahead = [(each.matcher.now, each.first_row, list(each.draft_ids)) for each in stretches if each.draft_ids]
        if ahead:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, ahead, words)
        for each in stretches:
            if each.matcher.now.is_error():
                self._fill_up_to_fault(each, word_RW)

    def _fill_up_to_fault(self, stretch: "Stretch", word_RW: Uint32Array) -> None:
        """Do the same row by row, for a matcher that the library gave up on: maybe only ahead, where nobody will come.

        The row of the fault allows nothing.
        """
        matcher, first_row, draft_ids = stretch
        word_RW[first_row : first_row + len(draft_ids) + 1] = 0
        trial = matcher.rebuilt()
        for row, draft_id in enumerate((*draft_ids, None), start=first_row):
            if not trial.is_error():
                fill_next_token_bitmask_par(self._executor, [(trial, row)], word_RW.view(np.int32))
            if trial.is_error():
                word_RW[row] = 0
                matcher.fault = _without_state(trial.get_error())
                break
            if draft_id is None or not is_allowed(word_RW[row], draft_id):
                break
            trial.consume_token(draft_id)
        matcher.now = matcher.rebuilt()


def is_allowed(word_W: Uint32Array, token_id: int) -> bool:
    """Whether the bit of an id is set."""
    return bool(word_W[token_id >> 5] >> (token_id & 31) & 1)


class Matcher:
    """A text and its place in a grammar.

    Attributes:
        vocabulary: The one it was compiled for.
        now: The library's state.
        fault: Why the library gave up at a row it was last asked about; None where it did not.
    """

    def __init__(self, vocabulary: Vocabulary, start: library.LLMatcher) -> None:
        self.vocabulary = vocabulary
        self._start = start
        self._token_ids: list[int] = []
        self.now = start.deep_copy()
        self.fault = _without_state(start.get_error()) if start.is_error() else None

    def restart(self) -> "Matcher":
        """Give a matcher of the same grammar at its beginning; the two share a lexer."""
        return Matcher(self.vocabulary, self._start)

    def consume(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were allowed; where the library gives up on them, nothing more is allowed."""
        self._token_ids += token_ids
        self.now.consume_tokens(list(token_ids))

    def rebuilt(self) -> library.LLMatcher:
        """Give the library's state built anew from all tokens."""
        matcher = self._start.deep_copy()
        matcher.consume_tokens(self._token_ids)
        return matcher


class Stretch(NamedTuple):
    """What one matcher is asked: what may come next now, and after each of its drafts.

    Attributes:
        matcher: The matcher.
        first_row: Row of the first answer; the others follow.
        draft_ids: The drafts.
    """

    matcher: Matcher
    first_row: int
    draft_ids: Sequence[int]


class _Tokens:
    """What the library wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, token_bytes: Sequence[bytes], marker_ids: Collection[int]) -> None:
        self.eos_token_id = len(token_bytes)
        self.tokens = [*token_bytes, b"<end>"]
        self.special_token_ids = [*marker_ids, self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError(f"the tokenizer of a grammar was asked to cut {text!r}: definitions must not force tokens")


def _without_state(message: str) -> str:
    """Give the library's message without what it adds of its own state and of the definition."""
    text = re.sub(r"\Aat \d+\(\d+\): |\n<.*|\n +\d+ \| .*", "", message, flags=re.DOTALL).strip()
    return "no token goes on with it" if text in _NO_TOKEN else text
