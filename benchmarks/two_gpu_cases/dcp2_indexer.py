"""The choice of positions where index keys lie on their owners, beside one rank that scans them all.

A rank scans its half, sends its best 2,048 with their scores, and merges what both sent; in the end it knows which rows
of the chosen ones it holds. The chosen sets are the same.
"""

from functools import partial

import torch

from benchmarks.gpu_timing import num_sets
from benchmarks.kernel_cases.rates import FP8_FLOPS_PER_US, memory_us
from benchmarks.kernel_cases.result import CaseResult
from benchmarks.two_gpu_cases.ranks import Ranks, graph_us, link_us
from specdec.dcp.communicator import Communicator
from specdec.dcp.shard_pages import ShardPages
from specdec.kernels.index_key_pages import INDEX_DIM, PAGE_BYTES, PAGE_SIZE, IndexKeyPages
from specdec.kernels.index_select import IndexSelect
from specdec.kernels.latent_formats import to_e4m3
from specdec.kernels.paged_index_scores import NUM_HEADS, IndexQueries
from specdec.models.glm.shard_launches import ShardLaunches

_ROWS, _K = 6, 2048
_SHAPES = ((1, 131072), (16, 131072), (4, 500032))
_MOST_SETS = 3


class _Inputs:
    """Queries, all keys, and those of this rank: the same queries and keys on every rank."""

    def __init__(self, num_requests: int, length: int, ranks: Ranks) -> None:
        device = ranks.device
        num_pages, num_rows = num_requests * length // PAGE_SIZE, num_requests * _ROWS
        pages_PX = _noise_keys(num_pages, device)
        # Pages go round the ranks; where each lies on its rank, and in the pool of all keys, says its id.
        local_QR = torch.stack([torch.randperm(-(-num_pages // ranks.size), device=device) for _ in range(ranks.size)])
        page_id_P = (local_QR * ranks.size + torch.arange(ranks.size, device=device)[:, None]).T.flatten()[:num_pages]
        page_id_BP = page_id_P.int().view(num_requests, -1)
        self.shards = ShardPages.of(page_id_BP, size=ranks.size, rank=ranks.rank)
        all_PX = torch.zeros((ranks.size * local_QR.shape[1], PAGE_BYTES), dtype=torch.uint8, device=device)
        all_PX[page_id_P] = pages_PX
        self.all_keys = IndexKeyPages.of(all_PX)
        self.own_keys = IndexKeyPages.of(all_PX[ranks.rank :: ranks.size].contiguous())
        position_T = (torch.arange(num_rows, device=device) % _ROWS + length - _ROWS).int()
        asked = {
            "query_TJD": to_e4m3(torch.randn((num_rows, NUM_HEADS, INDEX_DIM), device=device)).view(torch.uint8),
            "weight_TJ": torch.randn((num_rows, NUM_HEADS), device=device) * 0.05,
        }
        self.all_queries = IndexQueries(**asked, position_T=position_T, page_table_RP=page_id_BP)
        self.own_queries = IndexQueries(
            **asked, position_T=self._owned(position_T) - 1, page_table_RP=self.shards.owned_page_BP
        )

    def _owned(self, position_T: torch.Tensor) -> torch.Tensor:
        """Count the positions up to a row's own that are here, i32."""
        request_T = torch.arange(len(position_T), device=position_T.device) // _ROWS
        page_T = position_T // PAGE_SIZE
        is_here_T = self.shards.page_BP[request_T, page_T] >= 0
        return self.shards.before_BP[request_T, page_T] * PAGE_SIZE + is_here_T * (position_T % PAGE_SIZE + 1)


class _Choice:
    """The launches of one shape."""

    def __init__(self, num_requests: int, length: int, ranks: Ranks) -> None:
        num_rows, device = num_requests * _ROWS, ranks.device
        self._select = IndexSelect(num_rows=_ROWS, max_requests=num_requests, max_positions=length, k=_K)
        self._launches = {
            dcp: ShardLaunches(
                num_rows=num_rows,
                num_heads=32,
                latent_dim=512,
                index_topk=_K,
                max_positions=length,
                dcp=dcp,
                device=device,
            )
            for dcp in (ranks.peers, ranks.nccl)
        }
        self._row_TK = torch.empty((num_rows, _K), dtype=torch.int32, device=device)
        self._count_T = torch.empty(num_rows, dtype=torch.int32, device=device)
        self.position_TK = torch.empty_like(self._row_TK)

    def shared(self, dcp: Communicator, inputs: _Inputs) -> torch.Tensor:
        """As ranks that share the keys choose."""
        self._launches[dcp].choose(
            self._select, inputs.own_queries, inputs.own_keys, inputs.shards,
            out_position_TK=self.position_TK, out_row_TK=self._row_TK, out_count_T=self._count_T,
        )  # fmt: skip
        return self.position_TK

    def replicated(self, inputs: _Inputs) -> torch.Tensor:
        """As a rank chooses that has all keys."""
        self._select(inputs.all_queries, inputs.all_keys, out_position_TK=self.position_TK)
        return self.position_TK


def run(ranks: Ranks) -> list[CaseResult]:
    """Check and time every shape."""
    torch.manual_seed(0)
    return [_measure(num_requests, length, ranks) for num_requests, length in _SHAPES]


def _measure(num_requests: int, length: int, ranks: Ranks) -> CaseResult:
    key_bytes = num_requests * length * (INDEX_DIM + 4) // ranks.size
    sets = [_Inputs(num_requests, length, ranks) for _ in range(num_sets(key_bytes, most=_MOST_SETS))]
    choice = _Choice(num_requests, length, ranks)
    num_wrong = 0
    for inputs in sets:
        expected_TK = choice.replicated(inputs).clone()
        num_wrong += sum(int((choice.shared(dcp, inputs) != expected_TK).sum()) for dcp in (ranks.peers, ranks.nccl))
    flops = 2.0 * num_requests * length * _ROWS * NUM_HEADS * INDEX_DIM / ranks.size
    sent = 2 * num_requests * _ROWS * _K * 4 * (ranks.size - 1)
    return CaseResult(
        case="dcp2_indexer",
        shape=f"{num_requests} x {length}, {_ROWS} rows, keys on {ranks.size} ranks",
        ours_us=graph_us([partial(choice.shared, ranks.peers, inputs) for inputs in sets]),
        floor_us=max(memory_us(key_bytes), flops / FP8_FLOPS_PER_US) + link_us(sent),
        error=float(num_wrong),
        peers_us={
            "all keys on each rank": graph_us([partial(choice.replicated, inputs) for inputs in sets]),
            "by NCCL": graph_us([partial(choice.shared, ranks.nccl, inputs) for inputs in sets]),
        },
        note="error: positions that differ from the choice over all keys",
    )


def _noise_keys(num_pages: int, device: torch.device) -> torch.Tensor:
    pages_PX = torch.empty((num_pages, PAGE_BYTES), dtype=torch.uint8, device=device)
    for part_PX in pages_PX.split(4096):  # the float32 values of all keys would fill the memory
        values = torch.randn((len(part_PX), PAGE_SIZE * INDEX_DIM), device=device)
        part_PX[:, : values.shape[1]] = to_e4m3(values).view(torch.uint8)
        part_PX[:, values.shape[1] :] = torch.full((len(part_PX), PAGE_SIZE), 0.5, device=device).view(torch.uint8)
    return pages_PX
