"""Log-probabilities as the OpenAI API tells them: those of the model itself, before temperature and penalties."""

import math
from collections.abc import Sequence
from typing import Any

from specdec.sampling.token_logprobs import TokenLogprobs
from specdec.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


def chat_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Describe the tokens of a chat: all that were delivered, those of reasoning and markup too."""
    return [
        {
            **_token(token.token_id, token.raw_logprob, tokenizer),
            "top_logprobs": [_token(token_id, logprob, tokenizer) for token_id, logprob in token.raw_top],
        }
        for token in tokens
    ]


class CompletionLogprobs:
    """Describes the tokens of one completion, piece by piece.

    Args:
        tokenizer: The checkpoint's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def describe(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Give the fields for the next tokens; `text_offset` counts the characters of the tokens before each."""
        texts = [_text(token.token_id, self._tokenizer) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.raw_logprob) for token in tokens],
            "top_logprobs": [
                {_text(token_id, self._tokenizer): _finite(logprob) for token_id, logprob in token.raw_top}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": _text(token_id, tokenizer),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
