"""Fields that both kinds of OpenAI requests have, beside those that other engines have added to them."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from specdec.serving.api_errors import refused

# Names of request fields by sampling parameter, where they are not the same.
FIELD_OF = {"include_stop_in_output": "include_stop_str_in_output"}


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a streamed answer.

    Attributes:
        include_usage: Whether a last chunk without choices tells the usage; all others then say that they do not.
        continuous_usage_stats: Whether every chunk tells the usage so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields of chats and completions; null counts as not given.

    Attributes:
        model: A served name; may be left out.
        stream: Whether the answer comes as server-sent events.
        stream_options: Options of that.
        cache_salt: Keeps KV that is reused to requests that give the same.
        return_token_ids: Whether each choice also has the ids of its tokens.
        priority: A lower number goes first.
        timeout_s: Seconds in which it must have ended, where that is less than the server's.

    The others are sampling parameters, by their names there or, for `include_stop_str_in_output`, by the one that other
    engines gave it; see `specdec.sampling.sampling_params.SamplingParams`.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    timeout_s: float | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None

    def sampling(self) -> dict[str, Any]:
        """Give the sampling parameters by name; None where a field was not given.

        Raises:
            ApiError: 400; names the field that is wrong.
        """
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "stream_options goes with stream: true")
        return {
            **{name: getattr(self, name) for name in _SAME_NAMES},
            "logit_bias": None if self.logit_bias is None else _token_biases(self.logit_bias),
            "include_stop_in_output": self.include_stop_str_in_output,
        }


_SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "max_tokens",
    "ignore_eos",
    "allowed_token_ids",
    "banned_token_ids",
)


def refuse_fields(fields: Collection[str], advice: Mapping[str, str]) -> None:
    """Refuse fields that ask for what would change the answer and is not there.

    Args:
        fields: Names that were given with a value.
        advice: What to do instead, by name.

    Raises:
        ApiError: 400.
    """
    for name in fields:
        if name in advice:
            raise refused(name, f"{name} is not supported: {advice[name]}")


def _token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            raise refused("logit_bias", f"logit_bias must map token ids to numbers, got the key {key[:64]!r}")
    return {int(key): bias for key, bias in biases.items()}
