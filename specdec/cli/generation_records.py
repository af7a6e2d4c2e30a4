"""A generation as the JSON objects that `specdec generate --json` prints."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.result import Choice, GenerationResult, StreamDelta
    from specdec.sampling.token_logprobs import TokenLogprobs, TopLogprobs


def choice_record(
    result: "GenerationResult", choice: "Choice", *, request_index: int, seed: int | None
) -> dict[str, Any]:
    """Describe one choice of one request.

    Args:
        result: The request's.
        choice: One of its choices.
        request_index: Place of the prompt among those of the command.
        seed: What it was drawn with.
    """
    from specdec.result import speculation_record

    num_prompt_tokens, num_completion_tokens = result.usage.num_prompt_tokens, len(choice.token_ids)
    record = {
        "request_index": request_index,
        "index": choice.index,
        "token_ids": list(choice.token_ids),
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "seed": seed,
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "cached_tokens": result.usage.num_cached_tokens,
        },
        "speculation": speculation_record(choice.speculation),
    }
    if choice.logprobs is not None:
        record["logprobs"] = _token_records(choice.logprobs)
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = _token_records(result.prompt_logprobs)
    return record


def delta_record(delta: "StreamDelta") -> dict[str, Any]:
    """Describe one piece of a stream."""
    piece: dict[str, Any] = {"text": delta.text, "token_ids": list(delta.token_ids)}
    if delta.logprobs is not None:
        piece["logprobs"] = _token_records(delta.logprobs)
    return {"index": delta.index, "delta": piece, "finish_reason": delta.finish_reason}


def _token_records(tokens: "Sequence[TokenLogprobs]") -> list[dict[str, Any]]:
    return [
        {
            "token_id": token.token_id,
            "logprob": _finite(token.logprob),
            "top": _top_records(token.top),
            "raw_logprob": _finite(token.raw_logprob),
            "raw_top": _top_records(token.raw_top),
        }
        for token in tokens
    ]


def _top_records(top: "TopLogprobs") -> list[dict[str, Any]]:
    return [{"token_id": token_id, "logprob": _finite(logprob)} for token_id, logprob in top]


def _finite(logprob: float) -> float | None:
    """JSON has no infinity: null is the log-probability of what was excluded."""
    return logprob if math.isfinite(logprob) else None
