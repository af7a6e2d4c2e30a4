"""Which cached rows the queries of a batch attend to."""

from dataclasses import dataclass

import torch

from specdec.dcp.metadata import BatchMetadata

SLOTS_PER_TILE = 64  # owned slots of one attention product under DCP: narrower ones cost more than they save on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The choice of one full layer, valid for the shared layers that follow it.

    T = live rows, K = chosen positions, W = slots: K on one rank, and under DCP as many whole tiles as the row that
    owns most here needs.

    Attributes:
        position_TK: Chosen positions of each live row, ascending, -1 padded, i64 [T, K]; the same on every rank.
        row_TW: Physical token rows of those this rank owns, in the same order; -1 where padded, i64 [T, W].
        owned_TW: `row_TW >= 0`, bool [T, W].
        slots_per_tile: Slots of one attention product; it divides W and depends on the geometry alone, as a row's bits
            do.
    """

    position_TK: torch.Tensor
    row_TW: torch.Tensor
    owned_TW: torch.Tensor
    slots_per_tile: int

    @classmethod
    def of(cls, position_TK: torch.Tensor, metadata: BatchMetadata) -> "Selection":
        """Locate chosen positions in the pool that `metadata` was built for. Under DCP, waits for the device."""
        row_TW, slots_per_tile = metadata.rows_of(position_TK), position_TK.shape[1]
        if metadata.geometry.size > 1:
            row_TW, slots_per_tile = _owned_first(row_TW, multiple=SLOTS_PER_TILE), SLOTS_PER_TILE
        return cls(position_TK=position_TK, row_TW=row_TW, owned_TW=row_TW >= 0, slots_per_tile=slots_per_tile)


def _owned_first(row_TK: torch.Tensor, *, multiple: int) -> torch.Tensor:
    """Move the rows that are not -1 to the front, in order; the fewest columns that hold all, in whole multiples."""
    place_TK = (row_TK >= 0).cumsum(dim=1)
    num_owned = max(place_TK[:, -1].tolist(), default=0)
    width = max(multiple, -(-num_owned // multiple) * multiple)
    place_TK = torch.where(row_TK >= 0, place_TK - 1, width)  # column `width` collects the others
    return row_TK.new_full((len(row_TK), width + 1), -1).scatter_(1, place_TK, row_TK)[:, :width]
