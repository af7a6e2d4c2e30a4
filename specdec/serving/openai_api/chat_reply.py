"""The answers of `/v1/chat/completions`: whole, or in chunks."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.sampling.token_logprobs import TokenLogprobs
from specdec.serving.chat import RunningChat
from specdec.serving.openai_api.logprobs import chat_logprobs
from specdec.serving.openai_api.usage import usage_record
from specdec.serving.parsed_reply import Reply, ReplyPart
from specdec.serving.web.event_stream import KEEP_ALIVE, KEEP_ALIVE_S, event
from specdec.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """Writes the answer to one request.

    Attributes:
        answer_id: Its id.
        model: The name that the request gave.
        chat: What runs.
        tokenizer: The checkpoint's.
        returns_token_ids: Whether choices have the ids of their tokens, those of markers included.
        created: Unix time.
    """

    answer_id: str
    model: str
    chat: RunningChat
    tokenizer: Tokenizer
    returns_token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """Give everything once it is there.

        Raises:
            ApiError: The generation failed.
        """
        replies = await self.chat.reader.whole(self.chat.generation)
        choices = [
            {
                "index": index,
                "message": self._message(reply),
                "logprobs": self._logprobs(reply.logprobs) if self._has_logprobs else None,
                "finish_reason": reply.finish_reason,
                **({"token_ids": reply.token_ids} if self.returns_token_ids else {}),
            }
            for index, reply in enumerate(replies)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage_record(self.chat.usage())}

    async def chunks(self, *, includes_usage: bool) -> AsyncGenerator[bytes, None]:
        """Give the events of a stream.

        Args:
            includes_usage: Whether the last chunk tells the usage; all others then say that they do not.

        Raises:
            ApiError: The generation failed.
        """
        head = self._head("chat.completion.chunk")
        if includes_usage:
            head["usage"] = None
        generation, reader = self.chat.generation, self.chat.reader
        opening = b"".join(
            event({**head, "choices": [_choice(index, {"role": "assistant", "content": ""})]})
            for index in range(generation.params.n)
        )
        while True:
            try:
                pieces = await generation.news(timeout_s=KEEP_ALIVE_S)
            except TimeoutError:
                yield opening + KEEP_ALIVE
                opening = b""
                continue
            if not pieces:
                break
            read = map(reader.read, pieces)
            parts = [part for part in read if part.tells_something or (self.returns_token_ids and part.token_ids)]
            if data := opening + b"".join(event({**head, "choices": [self._choice(part)]}) for part in parts):
                yield data
            opening = b""
        if includes_usage:
            yield event({**head, "choices": [], "usage": usage_record(self.chat.usage())}) + DONE
        else:
            yield DONE

    def _choice(self, part: ReplyPart) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.content:
            delta["content"] = part.content
        if part.calls:
            delta["tool_calls"] = [
                {
                    "index": call.index,
                    **({} if call.name is None else {"id": call.call_id, "type": "function"}),
                    "function": {
                        **({} if call.name is None else {"name": call.name}),
                        "arguments": call.arguments,
                    },
                }
                for call in part.calls
            ]
        choice = _choice(part.index, delta)
        choice["finish_reason"] = part.finish_reason
        if self._has_logprobs:
            choice["logprobs"] = self._logprobs(part.logprobs)
        if self.returns_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    @property
    def _has_logprobs(self) -> bool:
        return self.chat.generation.params.logprobs is not None

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_logprobs(tokens, self.tokenizer), "refusal": None}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def _message(self, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.content if reply.content or not reply.calls else None,
            "refusal": None,
        }
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name, arguments in reply.calls
            ]
        return message


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
