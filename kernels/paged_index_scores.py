"""Scores of the DSA indexer for the rows of a decoding round, from pages of FP8 keys.

    score(t, s) = scale_s * sum_J weight_TJ * relu(query_TJD . key_sD)      for s <= position_t, else -inf

R = requests, Q = query rows of each, T = R * Q, J = 32 heads, D = 128, S = positions, P = pages of a request.
Queries and keys are e4m3 (`index_key_format`). A head's weight carries its query's scale and the constant factors;
weights may be negative. One pass over a request's keys serves all its rows. A score depends on its row and key alone,
to the bit: products are summed by the tensor core, which keeps about 14 bits of a sum, heads in float32, always in one
order.
Source: the lightning indexer of DeepSeek-V3.2.
"""

from dataclasses import dataclass

import torch

from specdec.kernels.cuda_program import NUM_SMS, CudaKernel, Macros, cuda_kernel
from specdec.kernels.errors import ConfigError
from specdec.kernels.index_key_pages import INDEX_DIM, PAGE_SIZE, IndexKeyPages
from specdec.kernels.latent_formats import from_e4m3
from specdec.kernels.tensor_check import check_tensor

NUM_HEADS = 32
MAX_ROWS = 8
_ALIGNMENT = 16  # bytes of a query that are loaded at once
_NAP_NS = 250  # of the warps that raise thresholds, between two looks at the counts


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexQueries:
    """What the indexer asks in one layer of a round.

    Attributes:
        query_TJD: e4m3 bytes, u8 [T, 32, 128], contiguous, at a multiple of 16 bytes; the rows of a request stand
            together.
        weight_TJ: float32 [T, 32], contiguous.
        position_T: The last position that a row may see, i32 [T]; -1 for none. Keys behind it may hold anything.
        page_table_RP: Pages of each request, i32 [R, P], valid up to the page of its rows' last position.
    """

    query_TJD: torch.Tensor
    weight_TJ: torch.Tensor
    position_T: torch.Tensor
    page_table_RP: torch.Tensor

    def __post_init__(self) -> None:
        num_rows, num_requests = len(self.position_T), len(self.page_table_RP)
        wanted = {
            "query_TJD": (torch.uint8, (num_rows, NUM_HEADS, INDEX_DIM), _ALIGNMENT),
            "weight_TJ": (torch.float32, (num_rows, NUM_HEADS), 1),
            "position_T": (torch.int32, (num_rows,), 1),
            "page_table_RP": (torch.int32, (num_requests, self.page_table_RP.shape[1]), 1),
        }
        for name, (dtype, shape, alignment) in wanted.items():
            check_tensor(name, getattr(self, name), dtype, shape, device=self.position_T.device, alignment=alignment)
        if num_requests and num_rows % num_requests:
            raise ValueError(
                f"each request has the same number of rows, got {num_rows} rows of {num_requests} requests"
            )

    @property
    def num_rows(self) -> int:
        """Q."""
        return len(self.position_T) // len(self.page_table_RP)


def paged_index_scores_ref(
    queries: IndexQueries, pages_PX: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Define `paged_index_scores`: the formula, in a dtype.

    Returns:
        [T, S], S = 64 * P: -inf behind a row's position.
    """
    num_requests, num_pages = queries.page_table_RP.shape
    page_RPX = pages_PX[queries.page_table_RP.clamp(min=0).long()]
    key_RPKD, scale_RPK = page_RPX[..., : PAGE_SIZE * INDEX_DIM], page_RPX[..., PAGE_SIZE * INDEX_DIM :]
    key_RSD = from_e4m3(key_RPKD).view(num_requests, -1, INDEX_DIM).to(dtype)
    scale_R1S = scale_RPK.contiguous().view(torch.float32).view(num_requests, 1, -1).to(dtype)
    query_RQJD = from_e4m3(queries.query_TJD).view(num_requests, -1, NUM_HEADS, INDEX_DIM).to(dtype)
    weight_RQJ = queries.weight_TJ.view(num_requests, -1, NUM_HEADS).to(dtype)
    head_score_RQJS = torch.einsum("rqjd,rsd->rqjs", query_RQJD, key_RSD).relu()
    score_TS = (torch.einsum("rqj,rqjs->rqs", weight_RQJ, head_score_RQJS) * scale_R1S).flatten(0, 1)
    column_S = torch.arange(num_pages * PAGE_SIZE, device=score_TS.device)
    return score_TS.masked_fill(column_S > queries.position_T[:, None], -torch.inf)


def paged_index_scores(queries: IndexQueries, keys: IndexKeyPages, *, out_TS: torch.Tensor) -> None:
    """Score every key of every request, asynchronously on the current stream of a GPU.

    Args:
        queries: At most 8 rows of a request.
        keys: The layer's pages.
        out_TS: float32 [T, S], S >= 64 * P, contiguous. What is behind the last page that a request's rows may see is
            not written.
    """
    capacity = out_TS.shape[1]
    check_tensor("out", out_TS, torch.float32, (len(queries.position_T), capacity), device=queries.position_T.device)
    kernel = scan_kernel(queries.num_rows, len(queries.page_table_RP), scores=True)
    launch_scan(kernel, queries, keys, (0, 0, 0, out_TS), capacity=capacity, k=0)


def launch_scan(
    kernel: CudaKernel,
    queries: IndexQueries,
    keys: IndexKeyPages,
    outputs: tuple[torch.Tensor | int, ...],
    *,
    capacity: int,
    k: int,
) -> None:
    """Launch index_scan.cu.

    Args:
        kernel: Of `scan_kernel`.
        queries: With the number of rows it was compiled for.
        keys: The layer's pages.
        outputs: Candidates, state, counts and scores, 0 for those the kernel does not write.
        capacity: Positions of a row of the candidates or scores.
        k: Scores that bound what is kept.
    """
    num_requests, num_pages = queries.page_table_RP.shape
    if keys.pages_PX.device != queries.position_T.device:
        raise ValueError(f"pages must be on {queries.position_T.device}, got {keys.pages_PX.device}")
    if num_pages * PAGE_SIZE > capacity:
        raise ValueError(f"page_table names {num_pages * PAGE_SIZE} positions, there is room for {capacity}")
    if not num_requests:
        return
    kernel(
        (NUM_SMS, 1, 1),  # scores do not depend on it
        128 * (_num_consumers(queries.num_rows) + 1),
        queries.query_TJD,
        queries.weight_TJ,
        queries.position_T,
        queries.page_table_RP,
        keys.pages_PX,
        keys.tensor_map,
        *outputs,
        num_requests,
        num_pages,
        keys.pages_PX.stride(0),
        capacity,
        k,
    )


def scan_kernel(num_rows: int, max_requests: int, *, scores: bool) -> CudaKernel:
    """Give the kernel for Q rows of a request and up to so many requests."""
    macros = scan_macros(num_rows, max_requests, scores=scores)
    shared_bytes = dict(macros)["SHARED_BYTES"]
    return cuda_kernel("index_scan.cu", "index_scan", macros=macros, shared_bytes=shared_bytes, starts_early=True)


def scan_macros(num_rows: int, max_requests: int, *, scores: bool) -> Macros:
    """Give what index_scan.cu is compiled with.

    Raises:
        ConfigError: A request has too many rows.
    """
    if not 1 <= num_rows <= MAX_ROWS:
        raise ConfigError(f"a request must have 1..{MAX_ROWS} query rows, got {num_rows}")
    room = 1 << max(0, max_requests - 1).bit_length()
    return (
        ("QUERY_ROWS", num_rows),
        ("MAX_REQUESTS", room),
        ("SCORES", int(scores)),
        ("NAP", _NAP_NS),
        ("SHARED_BYTES", _shared_bytes(num_rows, room)),
    )


def _num_consumers(num_rows: int) -> int:
    return 2 if num_rows > 6 else 3  # as in the kernel: of its registers


def _shared_bytes(num_rows: int, room: int) -> int:
    """Size of the kernel's `Shared`, field by field, and what aligns it."""
    rows, consumers = num_rows + num_rows % 2, _num_consumers(num_rows)
    stages = 9 if consumers == 3 else 8
    query, keys, scales = rows * NUM_HEADS * INDEX_DIM, stages * PAGE_SIZE * INDEX_DIM, stages * PAGE_SIZE * 4
    lists, counts = 4 * consumers * rows * (96 if consumers == 3 else 64) * 8, rows * 2048 * 4
    weights, barriers = rows * NUM_HEADS * 4, 2 * stages * 8
    rest = 4 * (3 * rows + 1 + room + 1)
    return query + keys + scales + lists + counts + weights + barriers + rest + 8
