"""What the answers of chats and of completions have in common: how one is framed, streamed and ended."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specdec.serving.driver import Piece
from specdec.serving.generation import Generation
from specdec.serving.openai_api.fields import StreamOptions
from specdec.serving.openai_api.usage import running_usage, usage_record
from specdec.serving.token_usage import TokenUsage
from specdec.serving.web.event_stream import KEEP_ALIVE, event, pieces_or_silence
from specdec.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass(kw_only=True, slots=True)
class Answer(ABC):
    """Writes the answer to one request, whole or in chunks; one of them, and once.

    Attributes:
        kind: The API's name of a whole answer.
        chunk_kind: That of a chunk.
        answer_id: Its id.
        model: The name that the request gave.
        generation: What runs.
        tokenizer: The checkpoint's.
        returns_token_ids: Whether choices have the ids of their tokens, those of markers included.
        created: Unix time.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    answer_id: str
    model: str
    generation: Generation
    tokenizer: Tokenizer
    returns_token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """Give everything once it is there.

        Raises:
            ApiError: The generation failed.
        """
        choices = await self._whole_choices()
        return {**self._head(self.kind), "choices": choices, "usage": usage_record(self._usage())}

    async def chunks(self, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """Give the events of a stream.

        Args:
            options: Which chunks tell the usage.

        Raises:
            ApiError: The generation failed.
        """
        opening: Sequence[dict[str, Any]] = self._opening_choices()
        num_tokens = 0
        while (pieces := await pieces_or_silence(self.generation)) is not None:
            data = [self._chunk(choice, options, num_tokens=0) for choice in opening]
            opening = ()
            for piece in pieces:
                num_tokens += len(piece.delta.token_ids)
                if (choice := self._choice(piece)) is not None:
                    data.append(self._chunk(choice, options, num_tokens=num_tokens))
            if not pieces:
                data.append(KEEP_ALIVE)
            if data:
                yield b"".join(data)
        if options.include_usage:
            usage = {**self._head(self.chunk_kind), "usage": usage_record(self._usage()), "choices": []}
            yield event(usage) + DONE
        else:
            yield DONE

    @abstractmethod
    async def _whole_choices(self) -> list[dict[str, Any]]:
        """Give the choices once they are there."""

    @abstractmethod
    def _choice(self, piece: Piece) -> dict[str, Any] | None:
        """Give what a piece adds to its choice; None where it says nothing to a client."""

    @abstractmethod
    def _usage(self) -> TokenUsage:
        """Say what it took, once all choices have ended."""

    def _opening_choices(self) -> Sequence[dict[str, Any]]:
        """Give what a stream says of the choices before there is anything of them."""
        return ()

    @property
    def _has_logprobs(self) -> bool:
        return self.generation.params.logprobs is not None

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choice: dict[str, Any], options: StreamOptions, *, num_tokens: int) -> bytes:
        """Write the chunk of one choice, with which `num_tokens` tokens of the request have been sent."""
        chunk = self._head(self.chunk_kind)
        if options.continuous_usage_stats:
            chunk["usage"] = running_usage(
                prompt=self.generation.num_prompt_tokens,
                cached=self.generation.num_cached_tokens,
                completion=num_tokens,
            )
        elif options.include_usage:
            chunk["usage"] = None  # the last chunk has it
        return event({**chunk, "choices": [choice]})
