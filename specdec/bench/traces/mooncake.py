"""Traces of single requests: Mooncake's, with an id for each block of a prompt, and those that have lengths alone."""

from collections.abc import Iterable

import msgspec

from specdec.bench.length_scale import LengthScale
from specdec.bench.traces.trace_lines import Count, Duration, PositiveCount, TraceLine
from specdec.bench.workload import BlockNumbering, Blocks, PlannedRequest, Session, Workload
from specdec.errors import RequestError

BLOCK_SIZE = 512


class MooncakeRow(msgspec.Struct):
    """One request: milliseconds from the start, tokens, and an id for each block of 512 tokens where they are known."""

    timestamp: Duration
    input_length: PositiveCount
    output_length: Count
    hash_ids: list[int] | None = None


def read_mooncake(lines: Iterable[TraceLine], scale: LengthScale) -> Workload:
    """Read a trace in which every request is a session of its own.

    Raises:
        RequestError: A line is not as the format says.
    """
    numbering = BlockNumbering()
    sessions = []
    for index, line in enumerate(lines):
        row = line.read(MooncakeRow)
        if row.hash_ids is None:
            prompt: tuple[Blocks, ...] = (numbering.fresh_run(scale.tokens(row.input_length)),)
        else:
            try:
                prompt = scale.blocks(
                    row.hash_ids, scope="", block_size=BLOCK_SIZE, num_tokens=row.input_length, numbering=numbering
                )
            except ValueError as error:
                raise RequestError(f"{line.origin}: {error}") from error
        request = PlannedRequest(index=index, prompt=prompt, num_output_tokens=scale.tokens(row.output_length))
        sessions.append(Session(name=str(index), start_s=row.timestamp / 1000, requests=(request,)))
    return Workload(kind="mooncake", sessions=tuple(sessions), num_blocks=numbering.num_blocks)
