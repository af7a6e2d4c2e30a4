"""Usage as the OpenAI API tells it."""

from typing import Any

from specdec.serving.token_usage import TokenUsage


def usage_record(usage: TokenUsage) -> dict[str, Any]:
    """Give the object; drafts stand where the API has predictions."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
    }
