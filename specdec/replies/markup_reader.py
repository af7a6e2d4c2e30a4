"""A reply as text and markers: the ids say where the markers are, the engine's text says what was delivered.

The engine's text lags behind its ids, by halves of characters and by what may become a stop string, and it may end
before them: a stop string is cut off, and so is the token that ended the turn. But it is always a beginning of what the
ids spell out, special tokens included. So each id is queued with the number of its characters, and leaves the queue
once as many have arrived.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.replies.reply_markup import Marker, ReplyMarkup
from specdec.text.detokenizer import Detokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A marker, or a piece of the text between two.

    Attributes:
        marker: None for text.
        text: The text; empty for a marker.
        num_tokens: Ordinary tokens that are complete with this text; 0 for a marker.
    """

    marker: Marker | None = None
    text: str = ""
    num_tokens: int = 0


@dataclass(slots=True)
class _Queued:
    """A token, or what of it has not arrived: its characters, and 1 for an ordinary token."""

    marker: Marker | None
    num_characters: int
    num_tokens: int


class MarkupReader:
    """Splits one reply at its markers.

    The pieces are the same, but for where text is cut, however ids and text are cut into pushes.
    """

    def __init__(self, markup: ReplyMarkup) -> None:
        self._markup = markup
        self._detokenizer = Detokenizer(markup.tokenizer, skip_special_tokens=False)
        self._queue: deque[_Queued] = deque()
        self._held = ""  # text that may be the beginning of the marker at the head of the queue

    def push(self, token_ids: Sequence[int], text: str) -> list[Piece]:
        """Take what one update delivered.

        Args:
            token_ids: Its ids.
            text: Its text, with special tokens; possibly that of earlier ids.
        """
        for token_id in token_ids:
            self._enqueue(token_id)
        return list(self._arrived(self._held + text))

    def finish(self) -> list[Piece]:
        """Give what the ids say beyond the text, once none follows.

        A marker whose text was cut off whole counts if it stands where the text ends: it stopped the reply. Text that
        was cut off never comes back; its tokens were delivered and are counted, up to the next marker.
        """
        pieces = []
        while self._queue and self._queue[0].marker is not None and not self._held:
            pieces.append(Piece(marker=self._queue.popleft().marker))
        num_tokens = 0
        while self._queue and self._queue[0].marker is None:
            num_tokens += self._queue.popleft().num_tokens
        return [*pieces, Piece(num_tokens=num_tokens)]

    def _enqueue(self, token_id: int) -> None:
        characters = self._detokenizer.push(token_id)
        marker = self._markup.marker_by_id.get(token_id)
        if marker is None:
            self._queue.append(_Queued(None, len(characters), 1))
            return
        own = marker.value or self._markup.tokenizer.decode([token_id], skip_special_tokens=False)
        num_before = len(characters) - len(own)
        if num_before > 0:  # U+FFFD, for the half of a character before the marker
            self._queue.append(_Queued(None, num_before, 0))
        self._queue.append(_Queued(marker, len(characters) - max(0, num_before), 0))

    def _arrived(self, text: str) -> Iterator[Piece]:
        begin = end = num_tokens = 0
        while self._queue:
            head = self._queue[0]
            left = len(text) - end
            if head.marker is None:
                end += min(left, head.num_characters)
                if left < head.num_characters:
                    head.num_characters -= left
                    break
                num_tokens += head.num_tokens
            else:
                if left < head.num_characters:
                    break
                if begin < end or num_tokens:
                    yield Piece(text=text[begin:end], num_tokens=num_tokens)
                assert text.startswith(head.marker.value, end), "the text is not that of the ids"
                end += head.num_characters
                begin, num_tokens = end, 0
                yield Piece(marker=head.marker)
            self._queue.popleft()
        else:
            end = len(text)  # U+FFFD, for a reply that ends in half a character
        self._held = text[end:]
        if begin < end or num_tokens:
            yield Piece(text=text[begin:end], num_tokens=num_tokens)
