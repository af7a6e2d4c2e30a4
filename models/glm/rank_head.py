"""The head of one tensor-parallel rank on a GPU, for any number of rows.

T = rows, H = hidden, V = vocabulary ids of all ranks. `GlmTarget.logits` defines it.
"""

from collections.abc import Iterator

import torch

from specdec.dcp.agreement import agree_drafts
from specdec.dcp.communicator import Communicator
from specdec.kernels.lm_head_pick import LmHeadPick
from specdec.models.glm.layer_slice import VocabularySlice

_ROWS = 32  # that the kernel takes at once


class RankHead:
    """Logits, or the best ids without them.

    Args:
        vocabulary: Of the rank.
        tp: Ranks that hold the other ids.
    """

    def __init__(self, vocabulary: VocabularySlice, *, tp: Communicator) -> None:
        self._pick = LmHeadPick(vocabulary.head_VH, first_id=vocabulary.first_id)
        self._num_ids = len(vocabulary.head_VH)
        self._tp = tp

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Give float32 [T, V], whole on every rank, of rows after the final norm."""
        hidden_TH = hidden_TH.contiguous()
        shard_TV = torch.empty((len(hidden_TH), self._num_ids), device=hidden_TH.device)
        for rows in _parts(len(hidden_TH)):
            self._pick(hidden_TH[rows], logits_TV=shard_TV[rows])
        return shard_TV if self._tp.size == 1 else self._tp.all_gather(shard_TV).transpose(0, 1).flatten(1)

    def best(self, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give each row's best id, i64 [T], the same on every rank, and whether its logits were finite, bool [T].

        The lowest id wins a tie. Logits are not written; that one is not finite is seen where it is the largest.
        """
        tops = [self._pick(hidden_TH[rows]) for rows in _parts(len(hidden_TH))]
        value_T, id_T, is_finite_T = (
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*tops, strict=True)
        )
        if self._tp.size == 1:
            return id_T, is_finite_T
        is_finite_NT = self._tp.all_gather(is_finite_T.to(torch.uint8))
        return agree_drafts(self._tp, value_T, id_T), is_finite_NT.amin(dim=0) > 0


def _parts(num_rows: int) -> Iterator[slice]:
    return (slice(first, first + _ROWS) for first in range(0, num_rows, _ROWS))
