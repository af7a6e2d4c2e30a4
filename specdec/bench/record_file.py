"""Records of requests as lines of JSON, one each."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from specdec.bench.request_record import RequestRecord
from specdec.errors import ConfigError


def write_records(path: Path, records: Iterable[RequestRecord], *, begin_s: float) -> None:
    """Write one line for each request.

    Args:
        path: File to write.
        records: Of the requests.
        begin_s: When the run began, on the clock of the records; times in the file count from it.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        with path.open("wb") as file:
            for record in records:
                file.write(msgspec.json.encode(as_fields(record, begin_s=begin_s)) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def as_fields(record: RequestRecord, *, begin_s: float) -> dict[str, Any]:
    """Give a record as a JSON object; `chunk_ms` counts from the request's own `sent_s`."""
    return {
        "request_index": record.request_index,
        "session": record.session,
        "category": record.category,
        "outcome": record.outcome,
        "error_kind": record.error_kind,
        "error_detail": record.error_detail,
        "finish_reason": record.finish_reason,
        "due_s": record.due_s - begin_s,
        "sent_s": record.sent_s - begin_s,
        "ended_s": record.ended_s - begin_s,
        "ttft_ms": _ms(record.ttft_s),
        "tpot_ms": _ms(record.tpot_s),
        "e2e_ms": _ms(record.e2e_s),
        "planned_prompt_tokens": record.num_planned_prompt,
        "planned_output_tokens": record.num_planned_output,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "cached_tokens": record.usage.num_cached,
        "accepted_tokens": record.usage.num_accepted,
        "rejected_tokens": record.usage.num_rejected,
        "chunk_ms": [_ms(chunk_s - record.sent_s) for chunk_s in record.chunks_s],
        "tokens_per_chunk": record.tokens_per_chunk,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
