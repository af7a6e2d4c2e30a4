"""Choose the positions that the rows of a decoding round attend to, straight from pages of FP8 index keys.

    chosen_T = the K best s of paged_index_scores(t, s), under the order of `top_positions`

T = query rows, K = positions kept. The choice is exact for the scores as the kernel computes them.

Three launches, and scores never reach memory. The first (index_scan.cu) keeps the candidates that are not below the
K-th best score met so far, of which it knows a bound from counts that all blocks share. Of 131,072 scores in no
particular order some 15,000 are kept when many requests share the device; where one has it alone, the scan ends before
the bound has risen, and most are kept: there is room for all of them. The second (top_candidates.cu) knows all counts,
and puts those together that these leave open, a few more than K; the third chooses among them with a block a row.
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
_STATE = 32  # i32 of a row's state, a cache line: its number of candidates and its bound
_COUNTS = 2080  # i32 of a row's counts: 2048 bins and the sums of 16 chunks of them
_THINNED = 1 << 14  # candidates of a row that the second kernel puts together, or none if there are more: ties
_THIN_BLOCKS = 2 * NUM_SMS  # about so many at once; none is for part of a row alone where there are more rows
_MOST_THIN_BLOCKS = 16  # of a row
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
        thinned: Likewise, [lists, 16,384].
        state: i32, zeros before a call; the last kernel leaves them so.
        counts: Likewise.
    """

    def __init__(self, *, num_lists: int, max_positions: int) -> None:
        capacity = -(-max_positions // PAGE_SIZE) * PAGE_SIZE
        self.candidates = torch.empty((num_lists, capacity), dtype=torch.int64, device="cuda")
        self.thinned = torch.empty((num_lists, _THINNED), dtype=torch.int64, device="cuda")
        self.state = torch.zeros((num_lists, _STATE), dtype=torch.int32, device="cuda")
        self.counts = torch.zeros((num_lists, _COUNTS), dtype=torch.int32, device="cuda")

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(part.nbytes for part in (self.candidates, self.thinned, self.state, self.counts))


class IndexSelect:
    """The three kernels, on the current device; for one stream at a time.

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
        self._scan = scan_kernel(num_rows, max_requests, scores=False)
        self._thin = top_kernel("thin_candidates", max_positions, shared_bytes=0)
        self._choose = top_kernel("select_candidates", max_positions)
        self._memory = memory or CandidateMemory(num_lists=num_lists, max_positions=max_positions)

    def __call__(
        self,
        queries: IndexQueries,
        keys: IndexKeyPages,
        *,
        out_position_TK: torch.Tensor,
        out_score_TK: torch.Tensor | None = None,
    ) -> None:
        """Choose, asynchronously on the current stream.

        Args:
            queries: Of at most `max_requests` requests with `num_rows` rows each.
            keys: The layer's pages.
            out_position_TK: The chosen positions, ascending, -1 behind the last, i32 [T, K], contiguous.
            out_score_TK: Their scores, float32 of the same shape, -inf behind the last; NaN is given as +inf.

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
        shape = (len(queries.position_T), self._k)
        check_chosen(out_position_TK, out_score_TK, shape, device=queries.position_T.device)
        memory = self._memory
        candidates, thinned, state, counts = memory.candidates, memory.thinned, memory.state, memory.counts
        capacity = candidates.shape[1]
        launch_scan(self._scan, queries, keys, (candidates, state, counts, 0), capacity=capacity, k=self._k)
        num_lists = len(queries.position_T)
        try:
            self._thin(
                (max(1, min(_MOST_THIN_BLOCKS, _THIN_BLOCKS // num_lists)), num_lists, 1),
                _THREADS,
                candidates,
                state,
                counts,
                thinned,
                capacity,
                self._k,
            )
            self._choose(
                (num_lists, 1, 1),
                _THREADS,
                candidates,
                thinned,
                state,
                counts,
                out_position_TK,
                0 if out_score_TK is None else out_score_TK,
                capacity,
                self._k,
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


def top_kernel(
    name: str, max_positions: int, *, num_owners: int | None = None, shared_bytes: int | None = None
) -> CudaKernel:
    """Give a kernel of top_candidates.cu.

    Args:
        name: Of the kernel.
        max_positions: Positions that it can choose lie below; at most 2^20.
        num_owners: Of the merge.
        shared_bytes: Dynamic shared memory; None is that of the kernels that choose.

    Raises:
        ConfigError: There are too many positions for a bitmap in shared memory.
    """
    macros = top_macros(max_positions, num_owners=num_owners)
    if shared_bytes is None:
        shared_bytes = dict(macros)["SHARED_BYTES"]
    return cuda_kernel("top_candidates.cu", name, macros=macros, shared_bytes=shared_bytes)


def top_macros(max_positions: int, *, num_owners: int | None = None) -> Macros:
    """Give what top_candidates.cu is compiled with; arguments and errors are those of `top_kernel`."""
    log_positions = max(_LEAST_LOG_POSITIONS, (max_positions - 1).bit_length())
    if log_positions > _MOST_LOG_POSITIONS:
        raise ConfigError(f"positions must lie below {1 << _MOST_LOG_POSITIONS}, got {max_positions} of them")
    lists, counts, rest = 8 * (MAX_K + 4096), 4 * 2048, 1024
    bitmap = (1 << log_positions) // 128 * (16 + 2)
    owners = () if num_owners is None else (("OWNERS", num_owners),)
    return (
        ("TOP_K", MAX_K),
        ("THINNED", _THINNED),
        ("LOG_POSITIONS", log_positions),
        ("SHARED_BYTES", lists + counts + rest + bitmap),
        *owners,
    )
