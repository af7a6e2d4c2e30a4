"""The token that each row of hidden states draws, on a GPU: the head and the choice, without a word to the host.

    greedy    argmax of the logits, which are not written
    drawn     argmax of logits / temperature + noise; a greedy row among them takes the argmax of its logits

T = rows, H = hidden, V = vocabulary ids of the rank. `transform_logits` and `verify_sampled` define it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec.dcp.agreement import agree_drafts
from specdec.dcp.communicator import Communicator
from specdec.kernels.chain_accept import ChainAcceptor, ChainResult
from specdec.kernels.lm_head_pick import LmHeadPick
from specdec.models.glm.layer_slice import VocabularySlice

_HEAD_ROWS = 32  # that the head takes at once


class DrawnTokens(NamedTuple):
    """What rows drew.

    Attributes:
        token_T: i64, the same on every rank.
        is_drawn_T: bool; False where there was nothing to draw: logits that are not finite.
    """

    token_T: torch.Tensor
    is_drawn_T: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNoise:
    """How rows draw that are not all greedy.

    Attributes:
        key_T: Noise keys, i64.
        temperature_T: float32; of a greedy row, 1.
        greedy_T: bool.
    """

    key_T: torch.Tensor
    temperature_T: torch.Tensor
    greedy_T: torch.Tensor


class TokenDraw:
    """The head of a rank and what it works in, for one stream.

    Args:
        vocabulary: Of the rank.
        max_rows: Most rows of a call.
        tp: Ranks that hold the other ids.
        with_noise: Whether rows draw with noise; then the logits of all ranks are gathered.
    """

    def __init__(self, vocabulary: VocabularySlice, *, max_rows: int, tp: Communicator, with_noise: bool) -> None:
        head_VH = vocabulary.head_VH
        self._head = LmHeadPick(head_VH, first_id=vocabulary.first_id)
        self._tp = tp
        device, num_ids = head_VH.device, tp.size * len(head_VH)
        self._acceptor: ChainAcceptor | None = None
        if with_noise:
            self._logits_TV = torch.empty((max_rows, len(head_VH)), device=device)
            self._acceptor = ChainAcceptor(
                max_requests=max_rows, max_drafts=0, vocab_size=num_ids, dtype=torch.float32, device=device
            )
            self._row_T1 = torch.arange(max_rows, device=device)[:, None]
            self._no_drafts_T0 = torch.empty((max_rows, 0), dtype=torch.int64, device=device)

    def __call__(self, hidden_TH: torch.Tensor, noise: RowNoise | None) -> DrawnTokens:
        """Draw, on the current stream.

        Args:
            hidden_TH: After the final norm, bfloat16, contiguous.
            noise: Of the rows; None where all are greedy.
        """
        if noise is None:
            tops = [self._head(hidden_TH[rows]) for rows in _parts(len(hidden_TH))]
            value_T, token_T = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*tops, strict=True))
            if self._tp.size == 1:
                return DrawnTokens(token_T, value_T.isfinite())
            is_finite_NT = self._tp.all_gather(value_T.isfinite().to(torch.uint8))
            return DrawnTokens(agree_drafts(self._tp, value_T, token_T), is_finite_NT.amin(dim=0) > 0)
        assert self._acceptor is not None
        num_rows = len(hidden_TH)
        logits_TV = self._logits_TV[:num_rows]
        for rows in _parts(num_rows):
            self._head(hidden_TH[rows], logits_TV=logits_TV[rows])
        if self._tp.size > 1:
            logits_TV = self._tp.all_gather(logits_TV).transpose(0, 1).flatten(1)
        logits_TV.div_(noise.temperature_T[:, None])
        drawn = ChainResult(
            token_ids_BK1=noise.key_T.new_empty((num_rows, 1)),
            num_accepted_B=noise.key_T.new_empty(num_rows),
            drawable_B=noise.greedy_T.new_empty(num_rows),
        )
        self._acceptor(
            logits_TV, self._row_T1[:num_rows], self._no_drafts_T0[:num_rows],
            key_T=noise.key_T, greedy_T=noise.greedy_T, out=drawn,
        )  # fmt: skip
        return DrawnTokens(drawn.token_ids_BK1[:, 0], drawn.drawable_B)


def _parts(num_rows: int) -> Iterator[slice]:
    return (slice(first, first + _HEAD_ROWS) for first in range(0, num_rows, _HEAD_ROWS))
