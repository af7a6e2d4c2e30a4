"""Prompts as a server takes them: token ids or text for /v1/completions, messages for /v1/chat/completions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any

import numpy as np

from specdec.bench.filler import Filler
from specdec.bench.words import WORDS
from specdec.bench.workload import Blocks, EarlierReply, PlannedRequest, Text


class PromptForm(StrEnum):
    """How prompts are sent."""

    IDS = "ids"
    TEXT = "text"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Where they are sent to."""
        return "v1/chat/completions" if self is PromptForm.CHAT else "v1/completions"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyContent:
    """What a server answered.

    Attributes:
        text: All of it, without reasoning.
        token_ids: Its ids; None where the server does not tell them.
    """

    text: str
    token_ids: tuple[int, ...] | None


class PromptWriter:
    """Turns planned prompts into the fields of a request.

    Args:
        form: How prompts are sent.
        vocabulary: Ids that prompts may be made of; read where `form` is IDS. Text is made of words, of which one is
            about one token.
        num_blocks: Block numbers are below it.
        seed: Of the filler.
    """

    def __init__(self, form: PromptForm, *, vocabulary: Sequence[int], num_blocks: int, seed: int) -> None:
        self.form = form
        self._vocabulary = np.array(vocabulary, dtype=np.int64)
        vocab_size = len(vocabulary) if form is PromptForm.IDS else len(WORDS)
        self._filler = Filler(vocab_size=vocab_size, num_blocks=num_blocks, seed=seed)

    def write(self, request: PlannedRequest, replies: Mapping[int, ReplyContent]) -> dict[str, Any]:
        """Give the fields that hold a prompt.

        Args:
            request: What to send; it holds no `Text` where `form` is IDS.
            replies: Of the session, by request; those that the prompt contains must be there.
        """
        if self.form is PromptForm.IDS:
            token_ids: list[int] = []
            for piece in request.prompt:
                token_ids += self._ids(piece, replies)
            return {"prompt": token_ids}
        if self.form is PromptForm.TEXT:
            return {"prompt": "".join(self._text(piece, replies) for piece in request.prompt)}
        return {"messages": list(self._messages(request, replies))}

    def _ids(self, piece: Blocks | EarlierReply | Text, replies: Mapping[int, ReplyContent]) -> Sequence[int]:
        assert not isinstance(piece, Text), piece
        if isinstance(piece, EarlierReply):
            token_ids = replies[piece.request_index].token_ids
            if token_ids is not None:
                return token_ids[: piece.num_tokens]
            piece = Blocks(
                block_numbers=(piece.block_number,), block_tokens=piece.num_tokens, num_tokens=piece.num_tokens
            )
        token_ids_T: list[int] = self._vocabulary[self._filler.tokens(piece)].tolist()
        return token_ids_T

    def _text(self, piece: Blocks | EarlierReply | Text, replies: Mapping[int, ReplyContent]) -> str:
        if isinstance(piece, Text):
            return f"{piece.text}\n\n"
        if isinstance(piece, EarlierReply):
            return replies[piece.request_index].text
        return "".join(f" {WORDS[token]}" for token in self._filler.tokens(piece))

    def _messages(self, request: PlannedRequest, replies: Mapping[int, ReplyContent]) -> Iterator[dict[str, str]]:
        for is_reply, pieces in groupby(request.prompt, key=lambda piece: isinstance(piece, EarlierReply)):
            text = "".join(self._text(piece, replies) for piece in pieces)
            # What the server said goes back to it as it was: only so can its cache have it.
            yield {"role": "assistant", "content": text} if is_reply else {"role": "user", "content": text.strip()}
