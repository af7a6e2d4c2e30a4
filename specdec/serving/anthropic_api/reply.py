"""The answers of `/v1/messages`: whole, or as events."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from specdec.serving.anthropic_api.blocks import Closed, ContentBlocks, Filled, Opened, Step
from specdec.serving.api_errors import ApiError
from specdec.serving.chat import RunningChat
from specdec.serving.parsed_reply import ReplyPart
from specdec.serving.token_usage import TokenUsage
from specdec.serving.web.event_stream import event, pieces_or_silence

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageAnswer:
    """Writes the answer to one request.

    Attributes:
        answer_id: Its id.
        model: The name that the request gave.
        chat: What runs.
    """

    answer_id: str
    model: str
    chat: RunningChat

    async def whole(self) -> dict[str, Any]:
        """Give everything once it is there.

        Raises:
            ApiError: The generation failed.
        """
        blocks, end = ContentBlocks(), ReplyPart(index=0)
        while pieces := await self.chat.generation.news():
            for piece in pieces:
                end = self.chat.reader.read(piece)
                for _ in blocks.steps(end):
                    pass
        usage = self._input_usage() | self._output_usage()
        return self._message(usage) | {"content": blocks.whole(), **_ending(end)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Give the events of a stream.

        Raises:
            ApiError: The generation failed.
        """
        generation, reader, blocks = self.chat.generation, self.chat.reader, ContentBlocks()
        has_begun = False
        while (pieces := await pieces_or_silence(generation)) is not None:
            data = b"" if pieces else _event("ping")
            if not has_begun:
                usage = self._input_usage() | {"output_tokens": 0}
                data = _event("message_start", message=self._message(usage)) + data
                has_begun = True
            for part in map(reader.read, pieces):
                data += b"".join(map(_step_event, blocks.steps(part)))
                if part.finish_reason is not None:
                    data += _event("message_delta", delta=_ending(part), usage=self._output_usage())
                    data += _event("message_stop")
            if data:
                yield data

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _input_usage(self) -> dict[str, Any]:
        """Say what the prompt took; cached tokens are not counted twice."""
        generation = self.chat.generation
        num_cached = generation.num_cached_tokens
        return {
            "input_tokens": generation.num_prompt_tokens - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
        }

    def _output_usage(self) -> dict[str, Any]:
        return {"output_tokens": TokenUsage.of(self.chat.generation.results()).completion}


def error_event(error: ApiError, *, request_id: str) -> bytes:
    """Tell an error inside of a stream, and end it."""
    return event(error.anthropic_body(request_id), name="error")


def _ending(part: ReplyPart) -> dict[str, Any]:
    assert part.finish_reason is not None
    reason = _STOP_REASONS[part.finish_reason]
    if part.stop is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": part.stop}


def _step_event(step: Step) -> bytes:
    match step:
        case Opened():
            return _event("content_block_start", index=step.index, content_block=step.block)
        case Filled():
            return _event("content_block_delta", index=step.index, delta=step.delta)
        case Closed():
            return _event("content_block_stop", index=step.index)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, name=kind)
