"""A reply as content blocks, opened, filled and closed in the order in which it comes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from specdec.serving.parsed_reply import ReplyPart


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins; `block` is empty."""

    index: int
    block: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Filled:
    """A block goes on."""

    index: int
    delta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Closed:
    """A block has ended."""

    index: int


Step = Opened | Filled | Closed


class ContentBlocks:
    """Turns the parts of one reply into blocks; what is streamed and what is sent whole come of the same steps."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._open_key: tuple[str, int] | None = None  # kind, and which call
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[list[str]] = []

    def steps(self, part: ReplyPart) -> Iterator[Step]:
        """Give what a part adds."""
        if part.reasoning:
            yield from self._enter(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
            yield self._fill({"type": "thinking_delta", "thinking": part.reasoning}, part.reasoning)
        if part.content:
            yield from self._enter(("text", 0), {"type": "text", "text": ""})
            yield self._fill({"type": "text_delta", "text": part.content}, part.content)
        for call in part.calls:
            block: dict[str, Any] = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            yield from self._enter(("tool_use", call.index), block)
            yield self._fill({"type": "input_json_delta", "partial_json": call.arguments}, call.arguments)
        if part.finish_reason is not None:
            yield from self._leave()

    def whole(self) -> list[dict[str, Any]]:
        """Give all blocks, filled."""
        return [_filled(block, "".join(pieces)) for block, pieces in zip(self._blocks, self._pieces, strict=True)]

    def _enter(self, key: tuple[str, int], block: dict[str, Any]) -> Iterator[Step]:
        if self._open_key == key:
            return
        yield from self._leave()
        self._open_key = key
        self._blocks.append(block)
        self._pieces.append([])
        yield Opened(len(self._blocks) - 1, block)

    def _fill(self, delta: dict[str, Any], piece: str) -> Filled:
        self._pieces[-1].append(piece)
        return Filled(len(self._blocks) - 1, delta)

    def _leave(self) -> Iterator[Step]:
        if self._open_key is not None:
            self._open_key = None
            yield Closed(len(self._blocks) - 1)


def _filled(block: dict[str, Any], content: str) -> dict[str, Any]:
    if block["type"] != "tool_use":
        return {**block, block["type"]: content}
    try:
        arguments = msgspec.json.decode(content)
    except msgspec.DecodeError:  # a call that the limit has cut: what there is of it is no object
        arguments = {}
    return {**block, "input": arguments}
