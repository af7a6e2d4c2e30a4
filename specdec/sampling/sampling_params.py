"""How the tokens of one request are chosen, and when the request ends."""

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from specdec.errors import CheckpointError, RequestError
from specdec.grammar.grammar import Grammar

# Keys of a checkpoint's generation_config.json that name a default of ours. Its `do_sample: false` means temperature 0.
_DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MAX_CHOICES = 128
MAX_LOGPROBS = 128
MAX_STOP_STRINGS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """What a request asks of its sampler.

    Every value is checked on construction, and by `check` what depends on the vocabulary. Errors are `RequestError`.

    Attributes:
        n: Choices to generate from one prompt; choice i draws with its own noise.
        temperature: Divides the logits; 0 takes the most likely token (the lowest id on a tie).
        top_p: Keeps the most likely tokens up to this probability mass; 1 keeps all.
        top_k: Keeps this many most likely tokens; 0 or -1 keeps all.
        min_p: Drops tokens less likely than this fraction of the most likely one; 0 drops none.
        repetition_penalty: Divides positive and multiplies negative logits of tokens of prompt and output; 1 is off.
        presence_penalty: Subtracted from the logit of every token of the output, -2..2.
        frequency_penalty: Subtracted as often as the token occurs in the output, -2..2.
        logit_bias: Added to the logits of single ids, -100..100.
        banned_token_ids: Never emitted.
        allowed_token_ids: Only these are emitted; None allows all.
        seed: Any signed or unsigned 64-bit number, taken modulo 2**64; None draws a fresh one.
        grammar: What the text must be; None leaves it free. Ids that end the text, `stop_token_ids` among them, are
            then allowed exactly where the grammar may end, and nothing else is where it has ended. `min_tokens` may ban
            them there: a request that is left without a token fails.
        stop: Strings that end the text; a single string may be given. Matched across token borders.
        stop_token_ids: Ids that end the text, beside the checkpoint's own end-of-sequence ids.
        min_tokens: No stop takes effect in the first `min_tokens` tokens.
        max_tokens: Most tokens to emit; None goes to the context limit.
        ignore_eos: The checkpoint's end-of-sequence ids do not stop the text; `stop_token_ids` still do.
        logprobs: Alternatives to report beside each emitted token's own log-probability; None reports nothing.
        prompt_logprobs: The same for the tokens of the prompt.
        include_stop_in_output: Whether the text keeps the stop string or the text of the stop id that ended it.
        skip_special_tokens: Whether special tokens are left out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # equal parameters still hash alike
    banned_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    grammar: Grammar | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_ids()
        self._check_stop()
        if not isinstance(self.grammar, Grammar | None):
            raise _refused("grammar", self.grammar, "must be a Grammar, as in Grammar.json_object()")
        for name in ("ignore_eos", "include_stop_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, getattr(self, name), "must be true or false")

    @classmethod
    def with_defaults(cls, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> "SamplingParams":
        """Build parameters from what the caller gave, and from `defaults` where it gave nothing.

        Args:
            given: Values by name; a key that is present counts as given, whatever its value.
            defaults: Usually `generation_defaults` of the checkpoint.

        Raises:
            RequestError: A name is unknown, or a value is refused.
        """
        known = {item.name for item in fields(cls)}
        for name in given:
            if name not in known:
                raise RequestError(f"{name} is not a sampling parameter; known are {', '.join(sorted(known))}")
        return cls(**{**defaults, **given})

    def check(self, *, vocab_size: int) -> None:
        """Check what depends on the vocabulary: every id named must be one of 0..vocab_size - 1.

        Raises:
            RequestError: An id is outside the vocabulary, or the bans leave no token.
        """
        named = {
            "logit_bias": self.logit_bias,
            "banned_token_ids": self.banned_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in named.items():
            for token_id in ids:
                if token_id >= vocab_size:
                    raise _refused(name, token_id, f"must be below the vocabulary size {vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise _refused(name, count, f"must not exceed the vocabulary size {vocab_size}")
        num_banned = len(self.banned_token_ids)
        if self.allowed_token_ids is not None:
            num_left = len(set(self.allowed_token_ids) - set(self.banned_token_ids))
        else:
            num_left = vocab_size - num_banned
        if num_left == 0:
            raise _refused("banned_token_ids", f"{num_banned} ids", "must leave at least one allowed token")

    def with_fresh_seed(self) -> "SamplingParams":
        """Give the same parameters with a seed: its own, or a random one where it has none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, so that the seed plays no part."""
        return self.temperature == 0

    def _check_numbers(self) -> None:
        self._take_int("n", 1, MAX_CHOICES)
        self._take_float("temperature", 0.0, 100.0)
        if 0 < self.temperature < 1e-5:
            raise _refused("temperature", self.temperature, "must be 0 (greedy) or at least 1e-5")
        self._take_float("top_p", 0.0, 1.0)
        self._take_int("top_k", -1, (1 << 31) - 1)
        self._take_float("min_p", 0.0, 1.0)
        self._take_float("repetition_penalty", 1e-2, 100.0)
        self._take_float("presence_penalty", -2.0, 2.0)
        self._take_float("frequency_penalty", -2.0, 2.0)
        if self.seed is not None:
            self._take_int("seed", -(1 << 63), (1 << 64) - 1)
        self._take_int("min_tokens", 0, None)
        if self.max_tokens is not None:
            self._take_int("max_tokens", 1, None)
            if self.min_tokens > self.max_tokens:
                raise _refused("min_tokens", self.min_tokens, f"must not exceed max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._take_int(name, 0, MAX_LOGPROBS)

    def _take_int(self, name: str, low: int, high: int | None) -> None:
        object.__setattr__(self, name, _int_of(name, getattr(self, name), low, high))

    def _take_float(self, name: str, low: float, high: float) -> None:
        object.__setattr__(self, name, _float_of(name, getattr(self, name), low, high))

    def _check_ids(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise _refused("logit_bias", self.logit_bias, "must map token ids to numbers")
        biases = {
            _int_of("a key of logit_bias", token_id, 0, None): _float_of(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
            for token_id, bias in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", biases)
        for name in ("banned_token_ids", "allowed_token_ids", "stop_token_ids"):
            ids = getattr(self, name)
            if name == "allowed_token_ids" and ids is None:
                continue
            if not isinstance(ids, (list, tuple, set, frozenset)):
                raise _refused(name, ids, "must be a list of token ids")
            object.__setattr__(self, name, tuple(sorted({_int_of(name, token_id, 0, None) for token_id in ids})))
        if self.allowed_token_ids == ():
            raise _refused("allowed_token_ids", [], "must name at least one id; leave it out to allow all")

    def _check_stop(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str):
            stop = (stop,)
        if not isinstance(stop, (list, tuple)):
            raise _refused("stop", stop, "must be a string or a list of strings")
        if len(stop) > MAX_STOP_STRINGS:
            raise _refused("stop", f"{len(stop)} strings", f"must be at most {MAX_STOP_STRINGS} strings")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise _refused("stop", text, "must be non-empty strings")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise _refused("stop", text, "must be valid Unicode, without a lone surrogate")
        object.__setattr__(self, "stop", tuple(dict.fromkeys(stop)))


def generation_defaults(path: Path) -> dict[str, Any]:
    """Read the sampling defaults of a checkpoint from its generation_config.json.

    Args:
        path: The file; a checkpoint without one has no defaults.

    Returns:
        Values by `SamplingParams` name; keys that we have no parameter for are left out.

    Raises:
        CheckpointError: The file is no JSON object, or a value is not possible.
    """
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(config).__name__}")
    defaults = {key: config[key] for key in _DEFAULT_KEYS if config.get(key) is not None}
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return defaults


def _refused(name: str, value: object, rule: str) -> RequestError:
    return RequestError(f"{name} {rule}, got {value!r}", parameter=name)


def _int_of(name: str, value: object, low: int, high: int | None) -> int:
    """Check an integer of any type, numpy's too; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _refused(name, value, "must be an integer")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise _refused(name, value, f"must be at least {low}" if high is None else f"must be in {low}..{high}")
    return number


def _float_of(name: str, value: object, low: float, high: float) -> float:
    """Check a number of any type, numpy's too; NaN lies in no range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refused(name, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not low <= number <= high:
        raise _refused(name, value, f"must be in {low:g}..{high:g}")
    return number
