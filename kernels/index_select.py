"""Choose the positions that the rows of a decoding round attend to, straight from pages of FP8 index keys.

    chosen_T = the K best s of paged_index_scores(t, s), under the order of `top_positions`
    row_TK   = pool_rows_ref(chosen_T), where it is wanted

T = query rows, K = positions kept, R = requests, P = pages of one. The choice is exact for the scores as the kernel
computes them.

Two launches, and scores never reach memory. The first (index_scan.cu) keeps the candidates that are not below the K-th
best score met so far, of which it knows a bound from counts that all blocks share. Where 16 requests share the device,
13,000 of a row's 131,072 scores in no particular order are kept, 11,300 of 32,768; where one has it alone, the scan
ends before the bound has risen, and more than half are kept, or all: there is room for them. The second
(top_candidates.cu) knows all counts. The blocks of a row put those candidates together that these leave open, a few
more than K, and the first of them chooses. How many blocks that are depends on how many rows there are, the choice does
not: what the counts leave open is one set, however it was dealt out, and its order is total.
"""

import torch

from specdec.kernels.cuda_program import NUM_SMS, CudaKernel, Macros, cuda_kernel
from specdec.kernels.errors import ConfigError
from specdec.kernels.index_key_pages import PAGE_SIZE, IndexKeyPages
from specdec.kernels.paged_index_scores import IndexQueries, launch_scan, paged_index_scores_ref, scan_kernel
from specdec.kernels.tensor_check import check_tensor
from specdec.kernels.top_positions import top_positions

MAX_K = 2048
_THREADS = 1024
_STATE = 32  # i32 of a row's state, a cache line: its number of candidates, its bound
_COUNTS = 2080  # i32 of a row's counts: 2048 bins and the sums of 16 chunks of them
_OPEN = 4096  # most candidates of a row that are put together; if there are more, ties, none are
_CLUSTER_SIZES = (8, 4, 2, 1)  # blocks of a row; 8 is the most that every GPU with clusters takes
_LEAST_LOG_POSITIONS = 17  # of the bitmap: a group of 128 positions for each thread
_MOST_LOG_POSITIONS = 20


def index_select_ref(queries: IndexQueries, pages_PX: torch.Tensor, *, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Define `IndexSelect`: score everything in a dtype, then choose; i64 [T, k]."""
    return top_positions(paged_index_scores_ref(queries, pages_PX, dtype=dtype).float(), k)


class CandidateMemory:
    """What choices are made in, on the current device: one may serve all `IndexSelect` that use one stream.

    Args:
        num_lists: Most query rows of a call.
        max_positions: Most positions of a request.

    Attributes:
        candidates: 8 bytes each, [lists, capacity].
        state: i32, zeros before a call; the last kernel leaves them so.
        counts: Likewise.
    """

    def __init__(self, *, num_lists: int, max_positions: int) -> None:
        capacity = -(-max_positions // PAGE_SIZE) * PAGE_SIZE
        self.candidates = torch.empty((num_lists, capacity), dtype=torch.int64, device="cuda")
        self.state = torch.zeros((num_lists, _STATE), dtype=torch.int32, device="cuda")
        self.counts = torch.zeros((num_lists, _COUNTS), dtype=torch.int32, device="cuda")

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(part.nbytes for part in (self.candidates, self.state, self.counts))


class IndexSelect:
    """The two kernels, on the current device; for one stream at a time.

    Args:
        num_rows: Query rows of a request, 1..8.
        max_requests: Most requests of a call.
        max_positions: Most positions of a request.
        k: Positions kept, 1..2048.
        memory: For as many rows and positions, shared with others; None makes one.

    Raises:
        ConfigError: `num_rows` or `k` is outside, or the memory is for less.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_requests: int,
        max_positions: int,
        k: int = MAX_K,
        memory: CandidateMemory | None = None,
    ) -> None:
        if not 1 <= k <= MAX_K:
            raise ConfigError(f"k must be 1..{MAX_K}, got {k}")
        num_lists = num_rows * max_requests
        if memory is not None and (len(memory.candidates) < num_lists or memory.candidates.shape[1] < max_positions):
            raise ConfigError(
                f"memory must be for {num_lists} rows of {max_positions} positions, got {list(memory.candidates.shape)}"
            )
        self._num_rows = num_rows
        self._max_requests = max_requests
        self._k = k
        self._memory = memory or CandidateMemory(num_lists=num_lists, max_positions=max_positions)
        capacity = self._memory.candidates.shape[1]  # a call may have as many positions as there is room for
        self._scan = scan_kernel(num_rows, max_requests, scores=False)
        self._choose = {  # all that calls of fewer requests may want, too: a graph must not be the first to want one
            size: top_kernel("select_candidates", select_macros(capacity, cluster_size=size))
            for size in {cluster_size(num_rows * num_requests) for num_requests in range(1, max_requests + 1)}
        }

    def __call__(
        self,
        queries: IndexQueries,
        keys: IndexKeyPages,
        *,
        out_position_TK: torch.Tensor,
        out_score_TK: torch.Tensor | None = None,
        out_row_TK: torch.Tensor | None = None,
        page_RP: torch.Tensor | None = None,
    ) -> None:
        """Choose, asynchronously on the current stream.

        Args:
            queries: Of at most `max_requests` requests with `num_rows` rows each.
            keys: The layer's pages.
            out_position_TK: The chosen positions, ascending, -1 behind the last, i32 [T, K], contiguous.
            out_score_TK: Their scores, float32 of the same shape, -inf behind the last; NaN is given as +inf.
            out_row_TK: Rows of the pool that hold them, in pages of 64, i32 of the same shape, -1 behind the last.
            page_RP: Pages for these, i32 [R, P], contiguous; the queries' page table where None is given.

        Raises:
            ValueError: There are more requests or positions than there is room for, or a tensor is of another kind.
        """
        num_requests = len(queries.page_table_RP)
        if not num_requests:
            return
        if num_requests > self._max_requests or queries.num_rows != self._num_rows:
            raise ValueError(
                f"made for {self._max_requests} requests of {self._num_rows} rows, got {num_requests} of "
                f"{queries.num_rows}"
            )
        num_lists = len(queries.position_T)
        device = queries.position_T.device
        check_chosen(out_position_TK, out_score_TK, (num_lists, self._k), device=device)
        page_RP = queries.page_table_RP if page_RP is None else page_RP
        if out_row_TK is not None:
            check_chosen_rows(out_row_TK, page_RP, (num_lists, self._k), queries.page_table_RP.shape, device=device)
        candidates, state, counts = self._memory.candidates, self._memory.state, self._memory.counts
        capacity = candidates.shape[1]
        size = cluster_size(num_lists)
        try:
            launch_scan(self._scan, queries, keys, (candidates, state, counts, 0), capacity=capacity, k=self._k)
            self._choose[size](
                (size * num_lists, 1, 1),
                _THREADS,
                candidates,
                state,
                counts,
                out_position_TK,
                0 if out_score_TK is None else out_score_TK,
                0 if out_row_TK is None else page_RP,
                0 if out_row_TK is None else out_row_TK,
                capacity,
                self._k,
                page_RP.shape[1],
                self._num_rows,
            )
        except BaseException:  # the next call must not go on with these candidates
            state.zero_()
            counts.zero_()
            raise


def check_chosen(
    position_TK: torch.Tensor, score_TK: torch.Tensor | None, shape: tuple[int, int], *, device: torch.device
) -> None:
    """Raise ValueError unless these take chosen positions and scores."""
    check_tensor("out_position", position_TK, torch.int32, shape, device=device)
    if score_TK is not None:
        check_tensor("out_score", score_TK, torch.float32, shape, device=device)


def check_chosen_rows(
    row_TK: torch.Tensor, page_RP: torch.Tensor, shape: tuple[int, int], pages: torch.Size, *, device: torch.device
) -> None:
    """Raise ValueError unless these take rows of the pool, and tell the pages of as many requests as are scanned."""
    check_tensor("out_row", row_TK, torch.int32, shape, device=device)
    check_tensor("page_RP", page_RP, torch.int32, pages, device=device)


def cluster_size(num_lists: int) -> int:
    """Give how many blocks a row may have if those of all rows are to run at once."""
    return next((size for size in _CLUSTER_SIZES if size * num_lists <= NUM_SMS), 1)


def select_macros(max_positions: int, *, cluster_size: int) -> Macros:
    """Give what `select_candidates` is compiled with; positions as in `top_macros`."""
    return (*top_macros(max_positions, list_bytes=8 * _OPEN), ("OPEN", _OPEN), ("CLUSTER", cluster_size))


def top_macros(max_positions: int, *, list_bytes: int = 0) -> Macros:
    """Give what every kernel of top_candidates.cu is compiled with.

    Args:
        max_positions: Positions that it can choose lie below; at most 2^20.
        list_bytes: Shared memory besides that of every kernel.

    Raises:
        ConfigError: There are too many positions for a bitmap in shared memory.
    """
    log_positions = max(_LEAST_LOG_POSITIONS, (max_positions - 1).bit_length())
    if log_positions > _MOST_LOG_POSITIONS:
        raise ConfigError(f"positions must lie below {1 << _MOST_LOG_POSITIONS}, got {max_positions} of them")
    chosen, counts, rest = 8 * MAX_K, 4 * 2048, 1024
    bitmap = (1 << log_positions) // 128 * (16 + 2)
    return (
        ("TOP_K", MAX_K),
        ("LOG_POSITIONS", log_positions),
        ("SHARED_BYTES", chosen + list_bytes + counts + rest + bitmap),
    )


def top_kernel(name: str, macros: Macros) -> CudaKernel:
    """Give a kernel of top_candidates.cu."""
    shared_bytes = dict(macros)["SHARED_BYTES"]
    return cuda_kernel("top_candidates.cu", name, macros=macros, shared_bytes=shared_bytes, starts_early=True)
