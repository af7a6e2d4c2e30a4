"""Replays of TraceLab: rounds of sessions, each prompt the conversation so far and something new behind it.

`prefix_len` tokens of the conversation (prompts and replies of the earlier rounds) stay, `input_len` are new. The next
round is sent `tool_wait_after_ms` after the reply.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from specdec.bench.length_scale import LengthScale
from specdec.bench.traces.trace_lines import Count, Duration, PositiveCount, TraceLine
from specdec.bench.workload import BlockNumbering, Blocks, EarlierReply, PlannedRequest, Session, Workload
from specdec.errors import RequestError


class TracelabRound(msgspec.Struct):
    """One round: times in milliseconds, lengths in tokens."""

    session_id: int | str
    round_idx: Count
    prefix_len: Count
    input_len: PositiveCount
    output_len: Count
    tool_wait_after_ms: Duration = 0.0
    arrival_time: Duration = 0.0


def read_tracelab(lines: Iterable[TraceLine], scale: LengthScale) -> Workload:
    """Read rounds; those of different sessions may be mixed, those of one session stand in order.

    Raises:
        RequestError: A line is not as the format says, or a round is missing.
    """
    numbering = BlockNumbering()
    conversations: dict[int | str, _Conversation] = {}
    for index, line in enumerate(lines):
        row = line.read(TracelabRound)
        conversation = conversations.setdefault(row.session_id, _Conversation(row.arrival_time / 1000))
        if row.round_idx != len(conversation.requests):
            raise RequestError(
                f"{line.origin}: round_idx must be {len(conversation.requests)}, the next of session "
                f"{row.session_id!r}; got {row.round_idx}"
            )
        conversation.add(index, row, scale, numbering)
    return Workload(
        kind="tracelab",
        sessions=tuple(
            Session(name=str(name), start_s=conversation.start_s, requests=tuple(conversation.requests))
            for name, conversation in conversations.items()
        ),
        num_blocks=numbering.num_blocks,
    )


@dataclass(slots=True)
class _Part:
    """A piece of a conversation and its length in the trace."""

    piece: Blocks | EarlierReply
    num_tokens: int


@dataclass(slots=True)
class _Conversation:
    start_s: float
    requests: list[PlannedRequest] = field(default_factory=list)
    _parts: list[_Part] = field(default_factory=list)
    _wait_s: float = 0.0

    def add(self, index: int, row: TracelabRound, scale: LengthScale, numbering: BlockNumbering) -> None:
        """Plan the next round."""
        self._keep_prefix(row.prefix_len, scale, numbering)
        self._append_filler(row.input_len, scale, numbering)
        num_output_tokens = scale.tokens(row.output_len)
        self.requests.append(
            PlannedRequest(
                index=index,
                prompt=tuple(part.piece for part in self._parts),
                num_output_tokens=num_output_tokens,
                after=(self.requests[-1].index,) if self.requests else (),
                think_time_s=self._wait_s,
            )
        )
        reply = EarlierReply(request_index=index, block_number=numbering.fresh(), num_tokens=num_output_tokens)
        self._parts.append(_Part(reply, row.output_len))
        self._wait_s = row.tool_wait_after_ms / 1000

    def _keep_prefix(self, num_tokens: int, scale: LengthScale, numbering: BlockNumbering) -> None:
        """Cut the conversation to a number of tokens, or fill it up: a session may begin with context from before."""
        kept = []
        for part in self._parts:
            if num_tokens == 0:
                break
            num_kept = min(part.num_tokens, num_tokens)
            piece = part.piece
            if num_kept < part.num_tokens:
                piece = replace(piece, num_tokens=min(scale.tokens(num_kept), piece.num_tokens))
            kept.append(_Part(piece, num_kept))
            num_tokens -= num_kept
        self._parts = kept
        if num_tokens:
            self._append_filler(num_tokens, scale, numbering)

    def _append_filler(self, num_tokens: int, scale: LengthScale, numbering: BlockNumbering) -> None:
        self._parts.append(_Part(numbering.fresh_run(scale.tokens(num_tokens)), num_tokens))
