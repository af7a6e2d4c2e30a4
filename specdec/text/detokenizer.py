"""Text from token ids as they arrive."""

import codecs

from specdec.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing sequence, never with a part of a character.

    The pieces that `push` and `finish` return join to `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Take the next id and give the characters that it completes, possibly none."""
        if token_id in self._skipped_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Give what is left: U+FFFD if the last character was cut, else nothing."""
        return self._decoder.decode(b"", final=True)
