"""Read the events of a streamed reply: when tokens came, how many, and what the server counted in the end.

OpenAI's API does not say how many tokens a chunk holds. Two common extensions do, and are used where a server has them:
`token_ids` of a choice (`return_token_ids`), and a running `usage` in every chunk (`continuous_usage_stats`).
"""

from typing import Any

import msgspec

from specdec.bench.prompt_writer import ReplyContent
from specdec.bench.request_record import TokenUsage

_END = "[DONE]"


class StreamFault(Exception):  # noqa: N818  # not raised to a caller of specdec: it becomes a record
    """A stream holds what no reply may hold.

    Args:
        kind: Kind of error.
        detail: What it was.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class ReplyStream:
    """Collects the events of one reply."""

    def __init__(self) -> None:
        self.chunks_s: list[float] = []
        self.finish_reason = ""
        self._has_ended = False
        self._texts: list[str] = []
        self._token_ids: list[int] | None = None
        self._tokens_per_chunk: list[int | None] = []
        self._num_counted = 0
        self._usage: dict[str, Any] = {}

    def push(self, data: str, now_s: float) -> None:
        """Take the data of the next event.

        Args:
            data: JSON, or the end mark.
            now_s: When it came.

        Raises:
            StreamFault: It is no chunk, or tells an error.
        """
        if data == _END:
            self._has_ended = True
            return
        chunk = _object(data)
        if error := chunk.get("error"):
            raise StreamFault("error_in_stream", str(error.get("message", error) if isinstance(error, dict) else error))
        num_tokens = self._take_running_usage(chunk)
        choices = chunk.get("choices") or [{}]
        choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
        token_ids = choice.get("token_ids")
        if isinstance(token_ids, list):
            self._token_ids = (self._token_ids or []) + token_ids
            num_tokens = len(token_ids)
        content, has_output = _output(choice)
        self._texts.append(content)
        if num_tokens or (num_tokens is None and has_output):
            self.chunks_s.append(now_s)
            self._tokens_per_chunk.append(num_tokens)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def is_whole(self) -> bool:
        """Whether the reply came to its end."""
        return self._has_ended or bool(self.finish_reason)

    @property
    def content(self) -> ReplyContent:
        """What came until now."""
        token_ids = None if self._token_ids is None else tuple(self._token_ids)
        return ReplyContent(text="".join(self._texts), token_ids=token_ids)

    @property
    def tokens_per_chunk(self) -> tuple[int, ...] | None:
        """Tokens of each chunk: as told, or one each where the chunks are as many as the tokens; None if not known."""
        told = [num_tokens for num_tokens in self._tokens_per_chunk if num_tokens is not None]
        if len(told) == len(self._tokens_per_chunk):
            return tuple(told)
        if self.usage.num_output == len(self._tokens_per_chunk):
            return (1,) * len(self._tokens_per_chunk)
        return None

    @property
    def usage(self) -> TokenUsage:
        """What the server counted until now."""
        prompt_details = _details(self._usage, "prompt_tokens_details")
        output_details = _details(self._usage, "completion_tokens_details")
        return TokenUsage(
            num_prompt=_count(self._usage, "prompt_tokens"),
            num_output=_count(self._usage, "completion_tokens"),
            num_cached=_count(prompt_details, "cached_tokens"),
            num_accepted=_count(output_details, "accepted_prediction_tokens"),
            num_rejected=_count(output_details, "rejected_prediction_tokens"),
        )

    def _take_running_usage(self, chunk: dict[str, Any]) -> int | None:
        """Keep the usage of a chunk; gives how many tokens it adds to the last one, None if it does not run along."""
        usage = chunk.get("usage")
        if not isinstance(usage, dict):
            return None
        self._usage = usage
        num_output = _count(usage, "completion_tokens")
        # Usage that comes with the last choice alone counts everything, not what came with that choice.
        if num_output is None or not chunk.get("choices") or None in self._tokens_per_chunk:
            return None
        num_new, self._num_counted = num_output - self._num_counted, num_output
        return max(0, num_new)


def _object(data: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StreamFault("bad_stream", f"{error}: {data[:200]!r}") from error


def _output(choice: dict[str, Any]) -> tuple[str, bool]:
    """Give the text of a chunk, and whether it carries anything that tokens became."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice.get("text") or ""
        return text, bool(text)
    content = delta.get("content") or ""
    others = ("reasoning_content", "reasoning", "tool_calls", "refusal")
    return content, bool(content) or any(delta.get(name) for name in others)


def _details(usage: dict[str, Any], name: str) -> dict[str, Any]:
    value = usage.get(name)
    return value if isinstance(value, dict) else {}


def _count(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
