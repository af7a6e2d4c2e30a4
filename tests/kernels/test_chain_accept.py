"""Drawn tokens and kept drafts against loops, the kernel against its definition; it compiles without spills."""

import itertools
from typing import Any

import pytest
import torch

from specdec.kernels.chain_accept import ChainAcceptor, chain_accept_macros, chain_accept_ref
from specdec.kernels.gumbel_noise import gumbel_noise
from tests.support.accept_cases import assert_same_result, make_chains, rows_apart, unwritten_result
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu


def make_rows(
    num_requests: int, max_drafts: int, num_ids: int, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, rows of requests with 0 to K drafts, drafts that are mostly what a greedy target draws, and keys."""
    generator = torch.Generator().manual_seed(seed)
    num_drafts_B, row_BK1 = make_chains(num_requests, max_drafts, generator)
    num_rows = int((num_drafts_B + 1).sum())
    logits_TV = torch.randn(num_rows, -(-num_ids // 8) * 8, generator=generator)[:, :num_ids]
    draft_ids_BK = logits_TV.argmax(dim=1)[row_BK1][:, :-1].clone()
    draft_ids_BK[torch.rand(draft_ids_BK.shape, generator=generator) < 0.2] = 1
    draft_ids_BK[torch.arange(max_drafts) >= num_drafts_B[:, None]] = -1
    key_T = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    return logits_TV, row_BK1, draft_ids_BK, key_T


def drawn_by_loops(logits_TV: torch.Tensor, key_T: torch.Tensor | None, greedy_T: torch.Tensor) -> list[int]:
    drawn = []
    for row, logits_V in enumerate(logits_TV.double()):
        scores_V = logits_V
        if key_T is not None and not greedy_T[row]:
            scores_V = logits_V + gumbel_noise(key_T[row : row + 1], len(logits_V))[0]
        scores = scores_V.tolist()
        drawn.append(scores.index(max(scores)))
    return drawn


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize(("num_requests", "max_drafts", "num_ids"), [(1, 0, 5), (4, 3, 17), (9, 5, 100)])
def test_the_definition_walks_each_chain(num_requests: int, max_drafts: int, num_ids: int, noise: bool) -> None:
    logits_TV, row_BK1, draft_ids_BK, key_T = make_rows(num_requests, max_drafts, num_ids)
    greedy_T = torch.arange(len(logits_TV)) % 2 == 0
    keys = key_T if noise else None
    result = chain_accept_ref(logits_TV, row_BK1, draft_ids_BK, key_T=keys, greedy_T=greedy_T)
    drawn = drawn_by_loops(logits_TV, keys, greedy_T if noise else torch.ones_like(greedy_T))
    for b, (rows, drafts) in enumerate(zip(row_BK1.tolist(), draft_ids_BK.tolist(), strict=True)):
        chain = [drawn[row] for row in rows]
        kept = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chain, drafts, strict=False))))
        assert result.num_accepted_B[b] == kept
        assert result.token_ids_BK1[b].tolist() == chain[: kept + 1] + [-1] * (max_drafts - kept)
    assert result.drawable_B.all()


def test_the_lowest_id_wins_a_tie_and_a_row_without_tokens_is_told() -> None:
    logits_TV = torch.zeros(3, 9)
    logits_TV[1] = -torch.inf
    logits_TV[2, 4] = torch.nan
    result = chain_accept_ref(logits_TV, torch.arange(3)[:, None], torch.empty(3, 0, dtype=torch.int64))
    assert result.token_ids_BK1[0].tolist() == [0]
    assert result.drawable_B.tolist() == [True, False, False]


def test_a_draft_before_a_row_without_tokens_is_the_last() -> None:
    logits_TV = torch.zeros(8, 9)
    logits_TV[2] = -torch.inf
    logits_TV[5, 4] = torch.nan
    rows_BK1, drafts_BK = torch.arange(8).view(2, 4), torch.zeros(2, 3, dtype=torch.int64)
    result = chain_accept_ref(logits_TV, rows_BK1, drafts_BK)
    assert result.token_ids_BK1.tolist() == [[0, 0, -1, -1], [0, -1, -1, -1]]
    assert result.num_accepted_B.tolist() == [1, 0]
    assert result.drawable_B.tolist() == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize(("vocab_size", "num_rows"), [(154880, 6), (154880, 1), (1037, 3)])
def test_the_kernel_compiles_and_spills_nothing(
    vocab_size: int, num_rows: int, dtype: torch.dtype, noise: bool
) -> None:
    macros = chain_accept_macros(vocab_size=vocab_size, num_rows=num_rows, dtype=dtype, noise=noise)
    assert most_bytes_spilled("chain_accept.cu", macros) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_TV": torch.zeros(3, 16, dtype=torch.bfloat16)}, "logits_TV must be torch.float32"),
        ({"logits_TV": torch.zeros(3, 17)[:, :16]}, "multiples of 16 bytes"),
        ({"row_BK1": torch.zeros(5, 3, dtype=torch.int64)}, "at most 4 requests, got 5"),
        ({"draft_ids_BK": torch.zeros(1, 3, dtype=torch.int64)}, "draft_ids_BK must be"),
        ({"key_T": torch.zeros(2, dtype=torch.int64)}, "key_T must be"),
        ({"logits_TV": torch.zeros(3, 16, device="meta")}, "logits_TV must be on cpu, got meta"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(changes: dict[str, Any], message: str) -> None:
    acceptor = ChainAcceptor(
        max_requests=4, max_drafts=2, vocab_size=16, dtype=torch.float32, device=torch.device("cpu")
    )
    arguments: dict[str, Any] = {
        "logits_TV": torch.zeros(3, 16),
        "row_BK1": torch.zeros(1, 3, dtype=torch.int64),
        "draft_ids_BK": torch.zeros(1, 2, dtype=torch.int64),
        "out": unwritten_result(1, 2, device="cpu"),
    }
    with pytest.raises(ValueError, match=message):
        acceptor(**(arguments | changes))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_requests", "max_drafts", "num_ids"), [(3, 5, 154880), (4, 0, 1037), (9, 3, 7)])
@pytest.mark.parametrize("kind", ["plain", "sharp", "flat", "sparse", "hostile", "ties"])
def test_a_gpu_draws_and_keeps_the_same_tokens(
    num_requests: int, max_drafts: int, num_ids: int, dtype: torch.dtype, kind: str
) -> None:
    logits_TV, row_BK1, draft_ids_BK, key_T = (part.cuda() for part in make_rows(num_requests, max_drafts, num_ids))
    logits_TV = (logits_TV * {"sharp": 1e6, "flat": 1e-3}.get(kind, 3.0)).to(dtype)
    if kind in {"sparse", "hostile"}:
        logits_TV[torch.rand(logits_TV.shape, device="cuda") < 0.9] = -torch.inf
    if kind == "hostile":
        logits_TV[0] = -torch.inf
        logits_TV[-1, num_ids // 2], logits_TV[len(logits_TV) // 2, num_ids - 1] = torch.nan, torch.inf
    if kind == "ties":
        logits_TV[:, ::2], logits_TV[:, 1::2] = -0.0, 0.0
    acceptor = ChainAcceptor(
        max_requests=num_requests, max_drafts=max_drafts, vocab_size=num_ids, dtype=dtype, device=logits_TV.device
    )
    apart_TV = rows_apart(logits_TV)
    half_T = torch.rand(len(logits_TV), device="cuda") < 0.5
    for keys, greedy_T in ((None, None), (key_T, None), (key_T, half_T)):
        expected = chain_accept_ref(logits_TV, row_BK1, draft_ids_BK, key_T=keys, greedy_T=greedy_T)
        out = unwritten_result(num_requests, max_drafts, device="cuda")
        acceptor(apart_TV, row_BK1, draft_ids_BK, key_T=keys, greedy_T=greedy_T, out=out)
        assert_same_result(out, expected)
