"""The answers of `/v1/completions`: whole, or in chunks of the same shape."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from specdec.sampling.token_logprobs import TokenLogprobs
from specdec.serving.driver import Piece
from specdec.serving.generation import Generation
from specdec.serving.openai_api.chat_reply import DONE
from specdec.serving.openai_api.logprobs import CompletionLogprobs
from specdec.serving.openai_api.usage import usage_record
from specdec.serving.parsed_reply import shown_logprobs
from specdec.serving.token_usage import TokenUsage
from specdec.serving.web.event_stream import KEEP_ALIVE, KEEP_ALIVE_S, event
from specdec.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionAnswer:
    """Writes the answer to one request; choice i of prompt p has the index p * n + i.

    Attributes:
        answer_id: Its id.
        model: The name that the request gave.
        generation: What runs.
        tokenizer: The checkpoint's.
        returns_token_ids: Whether choices have the ids of their tokens.
        created: Unix time.
    """

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
        num_choices = self.generation.num_choices
        texts: list[list[str]] = [[] for _ in range(num_choices)]
        tokens: list[list[TokenLogprobs]] = [[] for _ in range(num_choices)]
        token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        reasons: list[str | None] = [None] * num_choices
        while pieces := await self.generation.news():
            for piece in pieces:
                index = self._index(piece)
                texts[index].append(piece.delta.text)
                tokens[index] += self._tokens(piece)
                token_ids[index] += piece.delta.token_ids
                reasons[index] = piece.delta.finish_reason
        choices = [
            {
                "index": index,
                "text": "".join(texts[index]),
                "logprobs": CompletionLogprobs(self.tokenizer).describe(tokens[index]) if self._has_logprobs else None,
                "finish_reason": reasons[index],
                **({"token_ids": token_ids[index]} if self.returns_token_ids else {}),
            }
            for index in range(num_choices)
        ]
        return {**self._head(), "choices": choices, "usage": usage_record(self._usage())}

    async def chunks(self, *, includes_usage: bool) -> AsyncGenerator[bytes, None]:
        """Give the events of a stream.

        Args:
            includes_usage: Whether the last chunk tells the usage; all others then say that they do not.

        Raises:
            ApiError: The generation failed.
        """
        head = self._head()
        if includes_usage:
            head["usage"] = None
        logprobs = [CompletionLogprobs(self.tokenizer) for _ in range(self.generation.num_choices)]
        while True:
            try:
                pieces = await self.generation.news(timeout_s=KEEP_ALIVE_S)
            except TimeoutError:
                yield KEEP_ALIVE
                continue
            if not pieces:
                break
            events = []
            for piece in pieces:
                delta, index, tokens = piece.delta, self._index(piece), self._tokens(piece)
                token_ids = delta.token_ids if self.returns_token_ids else ()
                if not (delta.text or tokens or token_ids or delta.finish_reason):
                    continue
                choice = {
                    "index": index,
                    "text": delta.text,
                    "logprobs": logprobs[index].describe(tokens) if self._has_logprobs else None,
                    "finish_reason": delta.finish_reason,
                    **({"token_ids": token_ids} if self.returns_token_ids else {}),
                }
                events.append(event({**head, "choices": [choice]}))
            if events:
                yield b"".join(events)
        if includes_usage:
            yield event({**head, "choices": [], "usage": usage_record(self._usage())}) + DONE
        else:
            yield DONE

    def _index(self, piece: Piece) -> int:
        return piece.prompt_index * self.generation.params.n + piece.delta.index

    def _tokens(self, piece: Piece) -> list[TokenLogprobs]:
        return list(shown_logprobs(piece.delta, includes_stop=self.generation.params.include_stop_in_output))

    @property
    def _has_logprobs(self) -> bool:
        return self.generation.params.logprobs is not None

    def _head(self) -> dict[str, Any]:
        return {"id": self.answer_id, "object": "text_completion", "created": self.created, "model": self.model}

    def _usage(self) -> TokenUsage:
        return TokenUsage.of(self.generation.results())
