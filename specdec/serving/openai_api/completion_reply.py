"""The answers of `/v1/completions`: whole, or in chunks of the same shape."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from specdec.sampling.token_logprobs import TokenLogprobs
from specdec.serving.driver import Piece
from specdec.serving.openai_api.answer import Answer
from specdec.serving.openai_api.logprobs import CompletionLogprobs
from specdec.serving.parsed_reply import shown_logprobs
from specdec.serving.token_usage import TokenUsage


@dataclass(kw_only=True, slots=True)
class CompletionAnswer(Answer):
    """Writes the answer to one request; choice i of prompt p has the index p * n + i."""

    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"
    _logprobs: list[CompletionLogprobs] = field(init=False)

    def __post_init__(self) -> None:
        self._logprobs = [CompletionLogprobs(self.tokenizer) for _ in range(self.generation.num_choices)]

    async def _whole_choices(self) -> list[dict[str, Any]]:
        num_choices = self.generation.num_choices
        texts: list[list[str]] = [[] for _ in range(num_choices)]
        tokens: list[list[TokenLogprobs]] = [[] for _ in range(num_choices)]
        token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        reasons: list[str | None] = [None] * num_choices
        while pieces := await self.generation.news():
            for piece in pieces:
                index = self._index(piece)
                texts[index].append(piece.delta.text)
                tokens[index] += self._tokens(piece)
                token_ids[index] += piece.delta.token_ids
                reasons[index] = piece.delta.finish_reason
        return [
            {
                "index": index,
                "text": "".join(texts[index]),
                "logprobs": self._logprobs[index].describe(tokens[index]) if self._has_logprobs else None,
                "finish_reason": reasons[index],
                **({"token_ids": token_ids[index]} if self.returns_token_ids else {}),
            }
            for index in range(num_choices)
        ]

    def _choice(self, piece: Piece) -> dict[str, Any] | None:
        delta, index, tokens = piece.delta, self._index(piece), self._tokens(piece)
        token_ids = delta.token_ids if self.returns_token_ids else ()
        if not (delta.text or tokens or token_ids or delta.finish_reason):
            return None
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs[index].describe(tokens) if self._has_logprobs else None,
            "finish_reason": delta.finish_reason,
            **({"token_ids": token_ids} if self.returns_token_ids else {}),
        }

    def _index(self, piece: Piece) -> int:
        return piece.prompt_index * self.generation.params.n + piece.delta.index

    def _tokens(self, piece: Piece) -> list[TokenLogprobs]:
        return list(shown_logprobs(piece.delta, includes_stop=self.generation.params.include_stop_in_output))

    def _usage(self) -> TokenUsage:
        return TokenUsage.of(self.generation.results())
