"""Inputs of the paged indexer kernels: exact ones, whose scores have no rounding and many ties, and hostile ones."""

from dataclasses import dataclass

import torch

from specdec.kernels.index_key_pages import INDEX_DIM, PAGE_BYTES, PAGE_SIZE
from specdec.kernels.latent_formats import to_e4m3
from specdec.kernels.paged_index_scores import NUM_HEADS, IndexQueries

_NAN = 0x7F  # of e4m3


@dataclass(frozen=True, slots=True)
class IndexCase:
    """Queries and the pages they read; pages that no request has are full of NaN."""

    queries: IndexQueries
    pages_PX: torch.Tensor

    def to(self, device: str) -> "IndexCase":
        """Copy to a device."""
        queries = self.queries
        moved = IndexQueries(
            query_TJD=queries.query_TJD.to(device),
            weight_TJ=queries.weight_TJ.to(device),
            position_T=queries.position_T.to(device),
            page_table_RP=queries.page_table_RP.to(device),
        )
        return IndexCase(moved, self.pages_PX.to(device))


def make_index_case(lengths: list[int], *, num_rows: int, seed: int = 0, weight: str = "mixed") -> IndexCase:
    """Make a case of small integers: every score is exact, in the tensor core and in float32.

    Args:
        lengths: Keys of each request; its last row sees all of them, each row before it one less.
        num_rows: Query rows of each request.
        seed: Of the values.
        weight: "mixed", "negative", or "zero", with which all scores are equal.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(largest: int, *shape: int) -> torch.Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=generator).float()

    num_pages_R = [-(-length // PAGE_SIZE) for length in lengths]
    pages_PX = torch.full((sum(num_pages_R) + 3, PAGE_BYTES), _NAN, dtype=torch.uint8)
    place_P = torch.randperm(len(pages_PX), generator=generator).int()
    table_RP = torch.full((len(lengths), max(num_pages_R)), -1, dtype=torch.int32)
    used = 0
    for request, num_pages in enumerate(num_pages_R):
        ids = place_P[used : used + num_pages]
        table_RP[request, :num_pages] = ids
        keys = to_e4m3(integers(2, num_pages, PAGE_SIZE * INDEX_DIM)).view(torch.uint8)
        scales = torch.exp2(integers(1, num_pages, PAGE_SIZE)).view(torch.uint8)
        pages_PX[ids.long()] = torch.cat((keys, scales), dim=1)
        used += num_pages
    weight_TJ = integers(3, len(lengths) * num_rows, NUM_HEADS) / 8
    weight_TJ = {"mixed": weight_TJ, "negative": -weight_TJ.abs(), "zero": weight_TJ * 0}[weight]
    queries = IndexQueries(
        query_TJD=to_e4m3(integers(2, len(weight_TJ), NUM_HEADS, INDEX_DIM)).view(torch.uint8),
        weight_TJ=weight_TJ,
        position_T=torch.tensor(
            [max(length - num_rows + row, -1) for length in lengths for row in range(num_rows)], dtype=torch.int32
        ),
        page_table_RP=table_RP,
    )
    return IndexCase(queries, pages_PX)


def in_order(case: IndexCase, *, ascending: bool) -> IndexCase:
    """Give the first request scores that rise, or fall, with the position: equal keys of different scales."""
    page_P = case.queries.page_table_RP[0]
    page_P = page_P[page_P >= 0].long()
    steps = torch.arange(len(page_P) * PAGE_SIZE) * 2.0**-17
    scales = (1 + (steps if ascending else steps.flip(0))).view(len(page_P), PAGE_SIZE)
    pages_PX = case.pages_PX.clone()
    one = to_e4m3(torch.ones(1)).view(torch.uint8).item()
    pages_PX[page_P, : PAGE_SIZE * INDEX_DIM] = int(one)
    pages_PX[page_P, PAGE_SIZE * INDEX_DIM :] = scales.view(torch.uint8)
    queries = IndexQueries(
        query_TJD=torch.full_like(case.queries.query_TJD, int(one)),
        weight_TJ=torch.ones_like(case.queries.weight_TJ),
        position_T=case.queries.position_T,
        page_table_RP=case.queries.page_table_RP,
    )
    return IndexCase(queries, pages_PX)
