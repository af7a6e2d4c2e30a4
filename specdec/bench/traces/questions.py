"""Question files as of MT-bench and Spec-Bench: conversations of one or more user turns, in categories."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from specdec.bench.traces.trace_lines import TraceLine
from specdec.bench.workload import BlockNumbering, EarlierReply, Piece, PlannedRequest, Session, Text, Workload


class Question(msgspec.Struct):
    """One conversation."""

    question_id: int | str
    turns: Annotated[list[str], msgspec.Meta(min_length=1)]
    category: str = ""


def read_questions(lines: Iterable[TraceLine], *, num_output_tokens: int) -> Workload:
    """Read questions; every turn waits for the reply to the one before it, and has it in its prompt.

    Args:
        lines: Of the file.
        num_output_tokens: Tokens to ask for in every turn.

    Raises:
        RequestError: A line is not as the format says.
    """
    numbering = BlockNumbering()
    sessions = []
    index = 0
    for line in lines:
        row = line.read(Question)
        requests: list[PlannedRequest] = []
        conversation: tuple[Piece, ...] = ()
        for turn in row.turns:
            conversation += (Text(turn),)
            requests.append(
                PlannedRequest(
                    index=index,
                    prompt=conversation,
                    num_output_tokens=num_output_tokens,
                    after=(index - 1,) if requests else (),
                    category=row.category,
                )
            )
            reply = EarlierReply(request_index=index, block_number=numbering.fresh(), num_tokens=num_output_tokens)
            conversation += (reply,)
            index += 1
        sessions.append(Session(name=str(row.question_id), start_s=None, requests=tuple(requests)))
    return Workload(kind="questions", sessions=tuple(sessions), num_blocks=numbering.num_blocks)
