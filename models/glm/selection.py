"""Which cached rows the queries of a batch attend to."""

from dataclasses import dataclass

import torch

from specdec.dcp.metadata import BatchMetadata


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The choice of one full layer, valid for the shared layers that follow it.

    Attributes:
        position_TK: Chosen positions of each live row, ascending, -1 padded, i64 [T, K].
        row_TK: Their physical token rows on this rank, -1 where padded or not owned, i64 [T, K].
        owned_TK: `row_TK >= 0`, bool [T, K].
    """

    position_TK: torch.Tensor
    row_TK: torch.Tensor
    owned_TK: torch.Tensor

    @classmethod
    def of(cls, position_TK: torch.Tensor, metadata: BatchMetadata) -> "Selection":
        """Locate chosen positions in the pool that `metadata` was built for."""
        row_TK = metadata.rows_of(position_TK)
        return cls(position_TK=position_TK, row_TK=row_TK, owned_TK=row_TK >= 0)
