"""The forms a prompt may have: a text, token ids, or messages; whatever the annotations of a caller say."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from specdec.errors import ContextLengthError, RequestError
from specdec.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]

PROMPT_RULE = "a prompt must be a text, a list of token ids, or a list of messages"


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from a sequence of prompts, and give a list either way.

    Raises:
        RequestError: It is neither.
    """
    if isinstance(prompts, str | np.ndarray):
        return [cast(Prompt, prompts)]
    items = _items_of(prompts, PROMPT_RULE)
    if any(isinstance(item, int | float | np.number | Mapping) for item in items):
        return [cast(Prompt, prompts)]
    return items


def messages_of(prompt: object) -> list[Message] | None:
    """Give the messages of a conversation; None for a prompt that is none.

    Raises:
        RequestError: It has no form that a prompt may have.
    """
    items = _items_of(prompt, PROMPT_RULE)
    return items if items and all(isinstance(item, Mapping) for item in items) else None


def token_ids_of(token_ids: object, *, rule: str) -> list[int]:
    """Give token ids as a list of plain integers; whether the model has them is not looked at.

    Args:
        token_ids: A sequence of integers or an array of them with one dimension.
        rule: What is allowed in this place, for the message.

    Raises:
        RequestError: It is something else; names the type, or the first item that is no integer.
    """
    items = _items_of(token_ids, rule)
    for place, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            raise RequestError(f"{rule}; item {place} is {reprlib.repr(item)}")
    return [int(item) for item in items]


def check_length(text: str, tokenizer: Tokenizer, *, max_tokens: int) -> None:
    """Refuse a text that is too long whatever its tokens are, which is known before it is split into them.

    No token stands for more bytes than the longest entry of the vocabulary has.

    Raises:
        ContextLengthError: It has more than `max_tokens` tokens.
    """
    if len(text) <= max_tokens:
        return
    least = -(-len(text) // max(1, tokenizer.most_token_bytes))
    if least > max_tokens:
        raise ContextLengthError(
            f"the prompt has {len(text)} characters, so at least {least} tokens; at most {max_tokens} fit: shorten it"
        )


def _items_of(given: object, rule: str) -> list[Any]:
    """Give the items of a sequence that may hold ids, messages or prompts; text and bytes are none."""
    if isinstance(given, np.ndarray) and given.ndim == 1:
        return list(given)
    if isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview):
        return list(given)
    shape = f" of shape {list(given.shape)}" if isinstance(given, np.ndarray) else ""
    raise RequestError(f"{rule}, got {type(given).__name__}{shape}")
