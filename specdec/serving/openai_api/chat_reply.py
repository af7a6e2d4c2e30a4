"""The answers of `/v1/chat/completions`: whole, or in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from specdec.sampling.token_logprobs import TokenLogprobs
from specdec.serving.driver import Piece
from specdec.serving.openai_api.answer import Answer
from specdec.serving.openai_api.logprobs import chat_logprobs
from specdec.serving.parsed_reply import Reply, ReplyReader
from specdec.serving.token_usage import TokenUsage


@dataclass(kw_only=True, slots=True)
class ChatAnswer(Answer):
    """Writes the answer to one request.

    Attributes:
        reader: Reads what is generated.
    """

    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"
    reader: ReplyReader

    async def _whole_choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "message": _message(reply),
                "logprobs": self._logprobs(reply.logprobs) if self._has_logprobs else None,
                "finish_reason": reply.finish_reason,
                **({"token_ids": reply.token_ids} if self.returns_token_ids else {}),
            }
            for index, reply in enumerate(await self.reader.whole(self.generation))
        ]

    def _opening_choices(self) -> Sequence[dict[str, Any]]:
        opening = {"role": "assistant", "content": ""}
        return [_delta_choice(index, opening) for index in range(self.generation.num_choices)]

    def _choice(self, piece: Piece) -> dict[str, Any] | None:
        part = self.reader.read(piece)
        if not (part.tells_something or (self.returns_token_ids and part.token_ids)):
            return None
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
        choice = _delta_choice(part.index, delta)
        choice["finish_reason"] = part.finish_reason
        if self._has_logprobs:
            choice["logprobs"] = self._logprobs(part.logprobs)
        if self.returns_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_logprobs(tokens, self.tokenizer), "refusal": None}

    def _usage(self) -> TokenUsage:
        return TokenUsage.of(self.generation.results(), num_reasoning_tokens=self.reader.num_reasoning_tokens)


def _message(reply: Reply) -> dict[str, Any]:
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


def _delta_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
