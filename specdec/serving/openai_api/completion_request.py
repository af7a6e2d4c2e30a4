"""The body of `/v1/completions`."""

from collections.abc import Callable
from typing import Any

from specdec.serving.api_errors import refused
from specdec.serving.openai_api.fields import FIELD_OF, GenerationFields

UNSUPPORTED = {"suffix": "give the whole prompt as the model is to see it"}
_DEFAULT_MAX_TOKENS = 16  # the API's
_PROMPT_RULE = "prompt must be a text, token ids, or a list of either"

CompletionPrompt = str | list[int]


class CompletionRequest(GenerationFields, kw_only=True):
    """What a completion asks for.

    Attributes:
        prompt: A text, token ids, or a list of texts or of lists of token ids.
        logprobs: Alternatives to report beside each token's own log-probability; none are reported without it.
        skip_special_tokens: Whether special tokens are left out of the text.
        best_of: Only `n`.
        echo: Only false.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    skip_special_tokens: bool | None = None
    best_of: int | None = None
    echo: bool | None = None

    field_of = FIELD_OF

    def prompts(self) -> list[CompletionPrompt]:
        """Give the prompts, one or several.

        Raises:
            ApiError: 400; names the field that is wrong.
        """
        given: Any = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise refused("prompt", f"{_PROMPT_RULE}; got an empty list")
        kinds = {type(item) for item in given}
        if len(kinds) > 1:
            raise refused("prompt", f"{_PROMPT_RULE}; got a list of several kinds")
        return [given] if kinds == {int} else given

    def params(self) -> dict[str, Any]:
        """Give the sampling parameters by name.

        Raises:
            ApiError: 400; names the field that is wrong.
        """
        if self.echo:
            raise refused("echo", "echo is not supported: the prompt is not repeated")
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise refused("best_of", "best_of must equal n: all choices are returned")
        return {
            **self.sampling(),
            "max_tokens": _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            "logprobs": self.logprobs,
            "skip_special_tokens": self.skip_special_tokens,
        }


def token_ids(prompt: CompletionPrompt, encode: Callable[[str], list[int]]) -> list[int]:
    """Give the token ids of one prompt."""
    return encode(prompt) if isinstance(prompt, str) else prompt
