"""The pages of requests as the kernels read them on a rank that may hold only some: tables that stay on the device.

    page_BP          physical page of each of a request's pages, -1 where another rank has it
    before_BP        how many pages in front of it are here
    owned_page_BP    the physical pages that are here side by side, -1 behind the last
    owned_index_BP   which of the request's pages each of them is

B = requests, P = pages of a request.
"""

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPages:
    """Pages of the target pool on one of the ranks of a dcp group; i32 but for `first_owner_B`.

    Attributes:
        page_BP: See above.
        before_BP: See above.
        owned_page_BP: See above.
        owned_index_BP: See above; anything behind the last.
        first_owner_B: Rank that has a request's first page, i64: merges begin with it.
    """

    page_BP: torch.Tensor
    before_BP: torch.Tensor
    owned_page_BP: torch.Tensor
    owned_index_BP: torch.Tensor
    first_owner_B: torch.Tensor

    @classmethod
    def of(cls, page_id_BP: torch.Tensor, *, size: int, rank: int) -> "ShardPages":
        """Find the pages of a rank.

        Args:
            page_id_BP: Page ids, i32, -1 where there is none.
            size: Ranks of the dcp group.
            rank: This one.
        """
        is_here_BP = (page_id_BP >= 0) & (page_id_BP % size == rank)
        return cls.of_local(
            torch.where(is_here_BP, page_id_BP // size, -1),
            first_owner_B=(page_id_BP[:, 0] % size).clamp(min=0).long(),
        )

    @classmethod
    def of_local(cls, page_BP: torch.Tensor, *, first_owner_B: torch.Tensor) -> "ShardPages":
        """Make the tables of a rank's physical pages, i32, -1 where another rank has a page."""
        is_here_BP = page_BP >= 0
        order_BP = (~is_here_BP).int().argsort(dim=1, stable=True)
        return cls(
            page_BP=page_BP,
            before_BP=(is_here_BP.cumsum(dim=1) - is_here_BP.long()).int(),
            owned_page_BP=page_BP.gather(1, order_BP),
            owned_index_BP=order_BP.int(),
            first_owner_B=first_owner_B,
        )

    def take(self, other: "ShardPages") -> None:
        """Take in what other tables of the same shape say, in this memory."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))
