"""Draft sources that do not look at the model: they drive every path of verification.

Beside the MTP layer of a checkpoint, whose acceptance is what it is, these accept all, none, or a chosen part.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specdec.drafting.draft import DraftBatch, Drafts, ObservedRows
from specdec.request import Request


class ScriptedDraft:
    """Proposes what a function of the request says comes next.

    Args:
        continuation: From a request to the output tokens to propose, first output token first. Positions it does not
            reach get no draft.
        wrong_at: Place in every run of drafts, 0..K-1, that gets another token than the script's; None alters nothing.
        vocab_size: Ids are 0..vocab_size - 1.
    """

    def __init__(
        self, continuation: Callable[[Request], Sequence[int]], *, vocab_size: int, wrong_at: int | None = None
    ) -> None:
        self._continuation = continuation
        self._vocab_size = vocab_size
        self._wrong_at = wrong_at

    def observe(self, rows: ObservedRows) -> None:
        """Ignore what the target computed."""

    def propose(self, batch: DraftBatch) -> Drafts:
        """Propose the script from each request's length on."""
        most = int(batch.num_drafts_B.max())
        token_id_BK = np.zeros((len(batch.requests), most), dtype=np.int64)
        num_drafts_B = np.zeros(len(batch.requests), dtype=np.int64)
        for b, request in enumerate(batch.requests):
            begin = int(batch.length_B[b]) - len(request.prompt_ids)
            script = self._continuation(request)[begin : begin + int(batch.num_drafts_B[b])]
            token_id_BK[b, : len(script)] = script
            num_drafts_B[b] = len(script)
        if self._wrong_at is not None:
            wrong_B = token_id_BK[:, self._wrong_at : self._wrong_at + 1]
            wrong_B[:] = (wrong_B + 1) % self._vocab_size
        return Drafts(token_id_BK=token_id_BK, num_drafts_B=num_drafts_B)


def oracle_draft(
    outputs: Mapping[tuple[tuple[int, ...], int], Sequence[int]], *, vocab_size: int, wrong_at: int | None = None
) -> ScriptedDraft:
    """Propose the target's own next tokens, optionally with one wrong token in every run of drafts.

    Args:
        outputs: What the target emits without speculation, by (prompt ids, choice index).
        vocab_size: Ids are 0..vocab_size - 1.
        wrong_at: See `ScriptedDraft`.
    """

    def continuation(request: Request) -> Sequence[int]:
        return outputs[tuple(request.prompt_ids.tolist()), request.choice_index]

    return ScriptedDraft(continuation, vocab_size=vocab_size, wrong_at=wrong_at)


def random_draft(*, vocab_size: int, seed: int) -> ScriptedDraft:
    """Propose uniformly random tokens, the same for the same position of the same request."""

    def continuation(request: Request) -> Sequence[int]:
        generator = np.random.default_rng((seed, request.request_id))
        drafts: list[int] = generator.integers(0, vocab_size, size=request.limit).tolist()
        return drafts

    return ScriptedDraft(continuation, vocab_size=vocab_size)
