"""Usage as the OpenAI API tells it."""

from typing import Any

from specdec.serving.token_usage import TokenUsage


def usage_record(usage: TokenUsage) -> dict[str, Any]:
    """Give the object; drafts stand where the API has predictions."""
    return {
        **running_usage(prompt=usage.prompt, cached=usage.cached, completion=usage.completion),
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
    }


def running_usage(*, prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """Give what is known of it inside of a stream; `completion` are the tokens so far."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
