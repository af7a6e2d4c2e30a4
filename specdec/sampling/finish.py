"""Where the output of a request ends, judged token by token inside a run of emitted tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.stop_strings import StopMatcher
from specdec.text.detokenizer import Detokenizer
from specdec.text.tokenizer import Tokenizer


class FinishReason(StrEnum):
    """Why the output of a request ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishRule:
    """Ids that stop a request, and how many tokens it may have.

    Attributes:
        stop_ids: Ids that end the output.
        min_tokens: The first `min_tokens` tokens do not stop it, neither by id nor by completing a stop string.
        max_tokens: Most tokens of the output, at least 1.
    """

    stop_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, params: SamplingParams, *, eos_token_ids: Sequence[int], max_tokens: int) -> "FinishRule":
        """Give the rule of a request.

        Args:
            params: What the request asks.
            eos_token_ids: The checkpoint's.
            max_tokens: Tokens that the context leaves room for; `params.max_tokens` may ask for fewer.
        """
        eos = () if params.ignore_eos else eos_token_ids
        wanted = max_tokens if params.max_tokens is None else min(params.max_tokens, max_tokens)
        return cls(stop_ids=frozenset((*params.stop_token_ids, *eos)), min_tokens=params.min_tokens, max_tokens=wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """How much of a run belongs to the output.

    Attributes:
        num_delivered: Tokens of the run that do.
        finish_reason: Why the output ends with the last of them; None while it goes on.
        stop: The id or the string that ended it; None for any other reason.
    """

    num_delivered: int
    finish_reason: FinishReason | None
    stop: int | str | None = None


def finish_of_run(token_ids: Sequence[int], rule: FinishRule, *, num_output: int) -> Finish:
    """Judge a run of emitted ids, in order; a stop goes before the length limit at the same token.

    Args:
        token_ids: The run.
        rule: The request's.
        num_output: Tokens of the output before it.
    """
    for index, token_id in enumerate(token_ids):
        count = num_output + index + 1
        if token_id in rule.stop_ids and count > rule.min_tokens:
            return Finish(num_delivered=index + 1, finish_reason=FinishReason.STOP, stop=token_id)
        if count >= rule.max_tokens:
            return Finish(num_delivered=index + 1, finish_reason=FinishReason.LENGTH)
    return Finish(num_delivered=len(token_ids), finish_reason=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """What one run adds to the output of a request.

    Attributes:
        token_ids: The ids that count: up to the stop, the stop id included, never more than the limit.
        text: The text that is certain by now; what may become a stop string, or is half a character, comes later.
        finish: Whether and why the output ends here.
    """

    token_ids: tuple[int, ...]
    text: str
    finish: Finish


class OutputJudge:
    """Cuts the runs of one request into what is delivered, by ids, text and length.

    Args:
        params: The request's.
        rule: The request's.
        tokenizer: None gives no text; stop strings then cannot be asked for.
    """

    def __init__(self, params: SamplingParams, rule: FinishRule, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None and params.stop:
            raise ValueError("stop strings need a tokenizer")
        self._rule = rule
        self._include_stop = params.include_stop_in_output
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_in_output)
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self.num_output = 0

    def push(self, token_ids: Sequence[int]) -> Delivery:
        """Take the ids that one step emitted; nothing may follow once `finish.finish_reason` is set."""
        finish = finish_of_run(token_ids, self._rule, num_output=self.num_output)
        text = []
        for index, token_id in enumerate(token_ids[: finish.num_delivered]):
            is_stop_id = finish.finish_reason is FinishReason.STOP and index + 1 == finish.num_delivered
            if self._detokenizer is None or (is_stop_id and not self._include_stop):
                continue
            may_stop = self.num_output + index + 1 > self._rule.min_tokens
            match = self._matcher.push(self._detokenizer.push(token_id), may_stop=may_stop)
            text.append(match.visible)
            if match.stop is not None:
                finish = Finish(num_delivered=index + 1, finish_reason=FinishReason.STOP, stop=match.stop)
                break
        if finish.finish_reason is not None and not isinstance(
            finish.stop, str
        ):  # a stop string leaves nothing behind it
            text.append(self.flush())
        self.num_output += finish.num_delivered
        return Delivery(token_ids=tuple(token_ids[: finish.num_delivered]), text="".join(text), finish=finish)

    def flush(self) -> str:
        """Give the text still held back, for an output that ends without `push` saying so, as by cancellation."""
        last = "" if self._detokenizer is None else self._detokenizer.finish()
        return self._matcher.finish() + last
