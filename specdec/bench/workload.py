"""What a benchmark sends: sessions of requests whose prompts share blocks as those of a trace do."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """A run of filler tokens. Equal block numbers stand for equal tokens, unequal numbers for different ones.

    Attributes:
        block_numbers: One for each block.
        block_tokens: Tokens of a block, at least 1.
        num_tokens: Tokens of the run; it may end inside of its last block.
    """

    block_numbers: tuple[int, ...]
    block_tokens: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierReply:
    """What the server answered to an earlier request of the session, as a part of a later prompt.

    Attributes:
        request_index: The earlier request.
        block_number: Filler that stands in where the server does not tell the token ids of its replies.
        num_tokens: Tokens of the reply that the prompt takes, from its beginning.
    """

    request_index: int
    block_number: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is sent as it is: a question."""

    text: str


Piece = Blocks | EarlierReply | Text


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """One request.

    Attributes:
        index: Place in the workload.
        prompt: What the prompt consists of, in order.
        num_output_tokens: Tokens to ask for, at least 1.
        after: Earlier requests of the same session that must have ended before this one is sent.
        think_time_s: Seconds from the last of their ends, or from the session's start, to this request.
        category: Kind of question, "" where there is none.
    """

    index: int
    prompt: tuple[Piece, ...]
    num_output_tokens: int
    after: tuple[int, ...] = ()
    think_time_s: float = 0.0
    category: str = ""

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None where it holds text, whose tokens only the server can count."""
        num_tokens = 0
        for piece in self.prompt:
            if isinstance(piece, Text):
                return None
            num_tokens += piece.num_tokens
        return num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Requests of one client; those that do not wait for each other may run side by side.

    Attributes:
        name: As in the trace.
        start_s: Seconds from the start of the trace; None where the trace does not tell.
        requests: Each stands behind those it waits for.
    """

    name: str
    start_s: float | None
    requests: tuple[PlannedRequest, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """All sessions of a run.

    Attributes:
        kind: Format of the trace, or "synthetic".
        sessions: In the order of the trace.
        num_blocks: Block numbers are below it.
    """

    kind: str
    sessions: tuple[Session, ...]
    num_blocks: int

    @property
    def requests(self) -> Iterable[PlannedRequest]:
        """Every request, in the order of the trace."""
        return (request for session in self.sessions for request in session.requests)

    @property
    def has_times(self) -> bool:
        """Whether the trace tells when each session starts."""
        return all(session.start_s is not None for session in self.sessions)

    @property
    def has_text(self) -> bool:
        """Whether prompts hold text, which cannot be sent as token ids."""
        return any(request.num_prompt_tokens is None for request in self.requests)

    def limited(self, *, max_requests: int | None = None, max_context: int | None = None) -> "Workload":
        """Leave out what is too much.

        Args:
            max_requests: Requests to keep, from the beginning of the trace.
            max_context: Tokens of a prompt and its reply together; a session ends before the first request that needs
                more, for what waits for it.
        """
        sessions = []
        num_left = max_requests
        for session in self.sessions:
            kept: list[PlannedRequest] = []
            left_out: set[int] = set()
            for request in session.requests:
                needed = (request.num_prompt_tokens or 0) + request.num_output_tokens
                if (max_context is not None and needed > max_context) or left_out.intersection(request.after):
                    left_out.add(request.index)
                elif num_left is None or len(kept) < num_left:
                    kept.append(request)
            if kept:
                sessions.append(replace(session, requests=tuple(kept)))
            if num_left is not None:
                num_left -= len(kept)
        return replace(self, sessions=tuple(sessions))


class BlockNumbering:
    """Gives out block numbers, consecutively."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        self._counter = count()
        self.num_blocks = 0

    def fresh(self) -> int:
        """Give the number of a block that nothing else shares."""
        number = next(self._counter)
        self.num_blocks = number + 1
        return number

    def of(self, scope: str, hash_id: int) -> int:
        """Give the number of the block that a trace knows by an id.

        Args:
            scope: Within it equal ids mean equal blocks: a session, or "" for the whole trace.
            hash_id: As in the trace.
        """
        key = (scope, hash_id)
        if key not in self._numbers:
            self._numbers[key] = self.fresh()
        return self._numbers[key]

    def fresh_run(self, num_tokens: int) -> Blocks:
        """Give a run of tokens that nothing else shares."""
        return Blocks(block_numbers=(self.fresh(),), block_tokens=num_tokens, num_tokens=num_tokens)
