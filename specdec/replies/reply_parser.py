"""The reply of a GLM model, as the reasoning, the content and the tool calls of a chat API.

Streamed and unstreamed replies take the same way: whoever wants the whole pushes all of it. The deltas of a reply join
to the same whole however its tokens were cut into pushes.

- Reasoning ends at `</think>`, or at the `<tool_call>` before which a model forgot it.
- A marker that means nothing where it stands is text. Think markers before any text are left out: models repeat them.
- White space beside a call, with no text after it, is part of the markup; everything else is delivered as it is.
- A call that the end of the output cuts stays as it is: its arguments are then the beginning of a JSON object, which
  no client takes for a whole one. If not even its name is complete, it is given back as text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.replies.markup_reader import MarkupReader, Piece
from specdec.replies.reply_markup import Marker, ReplyMarkup
from specdec.replies.tool_call_reader import WHITE_SPACE, ToolCallReader
from specdec.replies.tool_schemas import ToolSchemas


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of one tool call.

    Attributes:
        index: Which call of the reply.
        name: The function's, with the first piece of a call; else None.
        arguments: A piece of JSON; the pieces of a complete call join to one object.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDelta:
    """What one push added to a reply.

    Attributes:
        reasoning: Text of the reasoning.
        content: Text of the answer.
        tool_calls: At most one piece of each call, in order.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ReplyParser:
    """Parses one reply.

    Args:
        markup: The checkpoint's markers.
        tools: Tools of the request, as in the OpenAI API; their schemas tell the types of arguments.
        starts_in_reasoning: What `markup.starts_in_reasoning` says of the prompt.
        parses_tool_calls: Whether calls are told apart; otherwise their markup is ordinary text.

    Attributes:
        num_reasoning_tokens: Ordinary tokens of the reasoning, markers left out: never more than were pushed.
        has_tool_calls: Whether a call was delivered, as a whole or in part.
    """

    def __init__(
        self,
        markup: ReplyMarkup,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        starts_in_reasoning: bool,
        parses_tool_calls: bool,
    ) -> None:
        self._reader = MarkupReader(markup)
        self._tools = ToolSchemas(tools)
        self._parses_tool_calls = parses_tool_calls
        self._is_reasoning = starts_in_reasoning and markup.has_reasoning
        self._has_begun = False  # whether reasoning or content has more than white space since the last think marker
        self._white_space = ""  # at the end of the content so far
        self._follows_call = False  # whether the content so far stands before a call
        self._call: ToolCallReader | None = None
        self._num_call_tokens = 0
        self._num_calls = 0
        self.num_reasoning_tokens = 0

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call was delivered, as a whole or in part."""
        return self._num_calls > 0

    @property
    def has_unfinished_call(self) -> bool:
        """Whether the reply is inside a call: after `finish`, whether its end cut one."""
        return self._call is not None

    def push(self, token_ids: Sequence[int], text: str) -> ReplyDelta:
        """Take what one update of the engine delivered.

        Args:
            token_ids: Its ids.
            text: Its text, made with `skip_special_tokens=False`; it may lag behind the ids, and end before them.
        """
        return self._take(self._reader.push(token_ids, text)).delta()

    def finish(self) -> ReplyDelta:
        """Give what was held back; nothing may be pushed after it."""
        parts = self._take(self._reader.finish())
        if self._call is not None and self._call.name is None:
            self._refuse(self._call, parts)
        if not self._follows_call:
            parts.content.append(self._white_space)
        return parts.delta()

    def _take(self, pieces: Iterable[Piece]) -> "_Parts":
        parts = _Parts()
        for piece in pieces:
            if piece.marker is not None:
                self._take_marker(piece.marker, parts)
                continue
            if self._call is not None:
                self._num_call_tokens += piece.num_tokens
            elif self._is_reasoning:
                self.num_reasoning_tokens += piece.num_tokens
            self._take_text(piece.text, parts)
        return parts

    def _take_text(self, text: str, parts: "_Parts") -> None:
        if self._call is not None:
            parts.add_arguments(self._num_calls - 1, self._call.take_text(text))
            if self._call.is_refused:
                self._refuse(self._call, parts)
        elif self._is_reasoning:
            parts.reasoning.append(text)
            self._has_begun |= bool(text.strip(WHITE_SPACE))
        elif self._parses_tool_calls:
            self._take_content(text, parts)
        else:
            parts.content.append(text)
            self._has_begun |= bool(text.strip(WHITE_SPACE))

    def _take_content(self, text: str, parts: "_Parts") -> None:
        """Deliver content; white space at its end waits for what comes, which may be a call and nothing more."""
        visible = text.rstrip(WHITE_SPACE)
        if visible:
            parts.content += [self._white_space, visible]
            self._white_space, self._follows_call, self._has_begun = "", False, True
        self._white_space += text[len(visible) :]

    def _take_marker(self, marker: Marker, parts: "_Parts") -> None:
        call = self._call
        if call is not None:
            was_in_value, was_named = call.is_in_value, call.name is not None
            arguments = call.take_marker(marker)
            if call.is_refused:
                self._refuse(call, parts)
            else:
                if call.name is not None and not was_named:
                    self._begin_call(call.name, parts)
                parts.add_arguments(self._num_calls - 1, arguments)
                if call.is_over:
                    self._call = None
                if was_in_value or marker is not Marker.CALL:
                    return
        match marker:
            case Marker.SPECIAL:
                return
            case Marker.CALL if self._parses_tool_calls:
                self._call, self._num_call_tokens = ToolCallReader(self._tools), 0
            case Marker.END_THINK if self._is_reasoning:
                self._is_reasoning, self._has_begun = False, False
            case Marker.THINK | Marker.END_THINK if not self._has_begun and not self.has_tool_calls:
                self._is_reasoning = marker is Marker.THINK
            case _:
                self._take_text(marker.value, parts)

    def _begin_call(self, name: str, parts: "_Parts") -> None:
        """Deliver the name of a call, which ends the reasoning."""
        parts.name_by_call[self._num_calls] = name
        self._num_calls += 1
        self._is_reasoning, self._follows_call = False, True

    def _refuse(self, call: ToolCallReader, parts: "_Parts") -> None:
        """Give back as text what turned out to be no call, where it stands."""
        self._call = None
        if self._is_reasoning:
            self.num_reasoning_tokens += self._num_call_tokens
        self._take_text(call.given_back, parts)


@dataclass(slots=True)
class _Parts:
    """What one push added, as it is found."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    name_by_call: dict[int, str] = field(default_factory=dict)
    arguments_by_call: dict[int, list[str]] = field(default_factory=dict)

    def add_arguments(self, index: int, arguments: str) -> None:
        if arguments:
            self.arguments_by_call.setdefault(index, []).append(arguments)

    def delta(self) -> ReplyDelta:
        return ReplyDelta(
            reasoning="".join(self.reasoning),
            content="".join(self.content),
            tool_calls=tuple(
                ToolCallDelta(index=index, name=self.name_by_call.get(index), arguments="".join(pieces))
                for index, pieces in self.arguments_by_call.items()  # a name comes with the object's first brace
            ),
        )
