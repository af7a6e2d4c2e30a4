"""Replies as both chat APIs tell them: reasoning, content, tool calls, an end, and what it took.

One path makes them, piece by piece; an answer that is not streamed is the sum of its pieces.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.replies.reply_markup import ReplyMarkup
from specdec.replies.reply_parser import ReplyParser
from specdec.result import StreamDelta
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.token_logprobs import TokenLogprobs
from specdec.serving.driver import Piece
from specdec.serving.generation import Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPart:
    """A piece of a tool call.

    Attributes:
        index: Which call of the reply.
        call_id: The same for all pieces of a call, with no other call anywhere.
        name: The function's, with the first piece of a call; else None.
        arguments: A piece of JSON; the pieces join to one object.
    """

    index: int
    call_id: str
    name: str | None
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPart:
    """What one piece of a generation adds to one reply.

    Attributes:
        index: Which choice.
        reasoning: Text of the reasoning.
        content: Text of the answer.
        calls: Pieces of tool calls, in order.
        token_ids: Of the tokens delivered, those of markers included.
        logprobs: Of the tokens delivered, where they were asked for.
        finish_reason: "stop", "length" or "tool_calls" on the last part.
        stop: The stop string that ended it.
    """

    index: int
    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPart, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop: str | None = None

    @property
    def tells_something(self) -> bool:
        """Whether a client has to hear of it."""
        return bool(self.reasoning or self.content or self.calls or self.logprobs or self.finish_reason)


class Reply:
    """A whole reply, or as much of it as there is.

    Attributes:
        token_ids: Of all tokens, those of markers included.
        logprobs: Of all tokens, where they were asked for.
        finish_reason: "stop", "length" or "tool_calls"; empty while it goes on.
        stop: The stop string that ended it.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason = ""
        self.stop: str | None = None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []

    def add(self, part: ReplyPart) -> None:
        """Take the next part."""
        self._reasoning.append(part.reasoning)
        self._content.append(part.content)
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        for call in part.calls:
            if call.name is not None:
                self._calls.append((call.call_id, call.name, []))
            self._calls[call.index][2].append(call.arguments)
        self.finish_reason = part.finish_reason or self.finish_reason
        self.stop = part.stop

    @property
    def reasoning(self) -> str:
        """Text of the reasoning."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """Text of the answer."""
        return "".join(self._content)

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """Id, name and arguments of each call."""
        return [(call_id, name, "".join(arguments)) for call_id, name, arguments in self._calls]


class ReplyReader:
    """Reads the pieces of a generation of one prompt as replies.

    Args:
        markup: The checkpoint's.
        prompt: Token ids of the prompt.
        params: How its choices are drawn.
        tools: That may be called; without any no calls are parsed.
        call_prefix: What ids of calls begin with.
    """

    def __init__(
        self,
        markup: ReplyMarkup,
        *,
        prompt: Sequence[int],
        params: SamplingParams,
        tools: Sequence[Mapping[str, Any]],
        call_prefix: str,
    ) -> None:
        starts_in_reasoning = markup.starts_in_reasoning(prompt)
        self._parsers = [
            ReplyParser(markup, tools=tools, starts_in_reasoning=starts_in_reasoning, parses_tool_calls=bool(tools))
            for _ in range(params.n)
        ]
        self._includes_stop = params.include_stop_in_output
        self._call_prefix = call_prefix
        self._call_ids: list[list[str]] = [[] for _ in self._parsers]

    @property
    def num_reasoning_tokens(self) -> int:
        """Count tokens of the reasoning so far, over all choices."""
        return sum(parser.num_reasoning_tokens for parser in self._parsers)

    def read(self, piece: Piece) -> ReplyPart:
        """Give what a piece adds."""
        delta = piece.delta
        parser = self._parsers[delta.index]
        added = [parser.push(delta.token_ids, delta.text)]
        if delta.finish_reason is not None:
            added.append(parser.finish())
        calls = []
        for reply in added:
            for call in reply.tool_calls:
                ids = self._call_ids[delta.index]
                if call.name is not None:
                    ids.append(self._call_prefix + secrets.token_hex(12))
                calls.append(
                    CallPart(index=call.index, call_id=ids[call.index], name=call.name, arguments=call.arguments)
                )
        return ReplyPart(
            index=delta.index,
            reasoning="".join(reply.reasoning for reply in added),
            content="".join(reply.content for reply in added),
            calls=tuple(calls),
            token_ids=delta.token_ids,
            logprobs=shown_logprobs(delta, includes_stop=self._includes_stop),
            finish_reason=None if delta.finish_reason is None else _finish_reason(delta.finish_reason, parser),
            stop=delta.stop if isinstance(delta.stop, str) else None,
        )

    async def whole(self, generation: Generation) -> list[Reply]:
        """Give the replies, one a choice, once all have ended.

        Raises:
            ApiError: The generation failed.
        """
        replies = [Reply() for _ in self._parsers]
        while pieces := await generation.news():
            for piece in pieces:
                replies[piece.delta.index].add(self.read(piece))
        return replies


def shown_logprobs(delta: StreamDelta, *, includes_stop: bool) -> Sequence[TokenLogprobs]:
    """Give the log-probabilities of a delta, without that of an id that ended the text and is not part of it."""
    tokens = delta.logprobs or ()
    return tokens[:-1] if isinstance(delta.stop, int) and not includes_stop else tokens


def _finish_reason(reason: str, parser: ReplyParser) -> str:
    """A reply that stopped by itself after a call stopped for the call; one that was cut did not."""
    return "tool_calls" if reason == "stop" and parser.has_tool_calls else str(reason)
