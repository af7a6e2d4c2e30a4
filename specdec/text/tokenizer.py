"""The checkpoint's tokenizer: text to ids, and ids to the bytes they stand for."""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

from specdec.errors import RequestError
from specdec.models.glm.vocabulary import generation_end_ids, open_tokenizer, tokenizer_vocab_size


class Tokenizer:
    """A byte-level BPE tokenizer as `tokenizer.json` describes it.

    Attributes:
        vocab_size: One more than the highest id that has a token. A model may have more; those decode to nothing.
        added_token_ids: Ids of the tokens that stand beside the pieces of text, as the markers of the chat markup do.
        special_token_ids: Those of them marked special, which `skip_special_tokens` leaves out.

    Args:
        path: The file tokenizer.json.

    Raises:
        CheckpointError: The file is missing or corrupt, or is no byte-level tokenizer.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = open_tokenizer(path)
        # A length limit kept in the file is meant for training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = tokenizer_vocab_size(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @functools.cached_property
    def most_token_bytes(self) -> int:
        """Bytes of the longest token; looks at the whole vocabulary, once."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    def encode(self, text: str) -> list[int]:
        """Give the ids of a text. Special tokens written out in it are recognised; none are added.

        Raises:
            RequestError: The text holds half of a surrogate pair, which no UTF-8 text can.
        """
        check_text(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Give the text of ids. Bytes that are no UTF-8 become U+FFFD; ids without a token become nothing."""
        kept = (i for i in token_ids if not (skip_special_tokens and i in self.special_token_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """Give the id of one token, such as a marker of the chat markup; None where the vocabulary lacks it."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Give the bytes of one id: possibly a part of a character, empty for an id without a token."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(map(_byte_of_character().__getitem__, token))
        except KeyError:  # an added token is written as itself, which the byte alphabet need not cover
            return bytes(token, "utf-8")


def check_text(text: str) -> None:
    """Refuse a text that cannot be written as UTF-8.

    Raises:
        RequestError: Names the first offending character.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text must be valid Unicode, got the lone surrogate {text[error.start]!r} at character {error.start}"
        ) from error


def text_of_bytes(data: bytes, *, source: str) -> str:
    """Give the text of bytes that must be UTF-8.

    Args:
        data: The bytes.
        source: Where they come from, for the message.

    Raises:
        RequestError: Names the first offending byte.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise RequestError(f"{source} must be UTF-8, got byte 0x{byte:02x} at offset {error.start}") from error


def eos_token_ids(directory: Path, config_ids: Iterable[int]) -> tuple[int, ...]:
    """Give all ids at which a checkpoint ends its turn: those of its config and of its generation_config.json.

    Args:
        directory: The checkpoint.
        config_ids: What config.json says.

    Raises:
        CheckpointError: generation_config.json is corrupt.
    """
    return tuple(sorted({*config_ids, *generation_end_ids(directory)}))


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Invert GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
