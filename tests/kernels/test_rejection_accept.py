"""The rejection rule in one launch: its definition is the engine's rule, and the kernel gives what it gives."""

from typing import Any

import pytest
import torch

from specdec.kernels.chain_accept import ChainResult
from specdec.kernels.gumbel_noise import NoiseStream
from specdec.kernels.rejection_accept import (
    RejectionAcceptor,
    RejectionKeys,
    rejection_accept_macros,
    rejection_accept_ref,
)
from specdec.sampling.accept import verify_by_rejection
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.sampling_rows import RequestSampling, SamplingBatch
from tests.support.accept_cases import assert_same_result, make_chains, rows_apart, unwritten_result
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu
from tests.support.misaligned import misaligned


def make_drafts(num_requests: int, max_drafts: int, num_ids: int, *, seed: int = 0) -> dict[str, Any]:
    """Requests with 0 to K drafts, drawn from probabilities near those of the target; every other one is greedy."""
    generator = torch.Generator().manual_seed(seed)
    num_drafts_B, row_BK1 = make_chains(num_requests, max_drafts, generator)
    num_rows = int((num_drafts_B + 1).sum())
    logits_TV = 3 * torch.randn(num_rows, -(-num_ids // 8) * 8, generator=generator)[:, :num_ids]
    near_BKV = logits_TV[row_BK1[:, :-1]] + 0.3 * torch.randn(num_requests, max_drafts, num_ids, generator=generator)
    draft_probs_BKV = near_BKV.softmax(dim=-1)
    draft_ids_BK = row_BK1[:, :-1].clone()
    if max_drafts:
        flat = torch.multinomial(draft_probs_BKV.flatten(0, 1), 1, generator=generator)
        draft_ids_BK = flat.view(num_requests, max_drafts)
    draft_ids_BK[torch.arange(max_drafts) >= num_drafts_B[:, None]] = -1
    request_T = torch.repeat_interleave(torch.arange(num_requests), num_drafts_B + 1)
    return {
        "logits_TV": logits_TV,
        "row_BK1": row_BK1,
        "draft_ids_BK": draft_ids_BK,
        "draft_probs_BKV": draft_probs_BKV,
        "keys": RejectionKeys(*(torch.randint(-(2**62), 2**62, (num_rows,), generator=generator) for _ in range(3))),
        "greedy_T": request_T % 2 == 1,
    }


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("greedy", ["none", "some"])
@pytest.mark.parametrize("broken", [False, True])
def test_the_definition_is_the_rule_of_the_engine(certain: bool, greedy: str, broken: bool) -> None:
    num_requests = 24
    drafts = make_drafts(num_requests, 3, 50)
    if broken:
        drafts["logits_TV"][::3, 7], drafts["logits_TV"][1::7] = torch.nan, -torch.inf
    params = [
        SamplingParams(temperature=0.0 if greedy == "some" and b % 2 else 1.0, seed=b) for b in range(num_requests)
    ]
    requests = [RequestSampling(p, choice=0, prompt_ids=[1], stop_ids=[], vocab_size=50) for p in params]
    batch = SamplingBatch(requests, device=torch.device("cpu"))
    ids = [[token_id for token_id in row if token_id >= 0] for row in drafts["draft_ids_BK"].tolist()]
    rows = batch.verify_rows(torch.arange(num_requests).numpy() + 5, ids)
    width = rows.draft_ids_BK.shape[1]
    probs_BKV = None if certain else drafts["draft_probs_BKV"][:, :width]
    expected = verify_by_rejection(drafts["logits_TV"], rows, probs_BKV)
    keys = RejectionKeys(*(rows.keys(s) for s in (NoiseStream.COIN, NoiseStream.RESIDUAL, NoiseStream.TARGET)))
    result = rejection_accept_ref(
        drafts["logits_TV"], rows.row_BK1, rows.draft_ids_BK, probs_BKV, keys, greedy_T=rows.greedy_T
    )
    assert expected.drawable_B.any()
    assert expected.drawable_B.all() != broken
    assert_same_result(result, ChainResult(expected.token_ids_BK1, expected.num_accepted_B, expected.drawable_B))


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(154880, 6), (154880, 1), (154880, 16), (1037, 3)])
def test_the_kernel_compiles_and_spills_nothing(vocab_size: int, num_rows: int) -> None:
    macros = rejection_accept_macros(vocab_size=vocab_size, num_rows=num_rows)
    assert most_bytes_spilled("rejection_accept.cu", macros) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_TV": torch.zeros(3, 16, dtype=torch.bfloat16)}, "logits_TV must be torch.float32"),
        ({"draft_probs_BKV": torch.zeros(1, 2, 8)}, "draft_probs_BKV must be"),
        ({"draft_probs_BKV": misaligned(torch.zeros(1, 2, 16))}, "draft_probs_BKV must begin"),
        ({"keys": RejectionKeys(*(torch.zeros(2, dtype=torch.int64) for _ in range(3)))}, "keys.coin_T must be"),
        ({"row_BK1": torch.zeros(5, 3, dtype=torch.int64)}, "at most 4 requests, got 5"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(changes: dict[str, Any], message: str) -> None:
    acceptor = RejectionAcceptor(max_requests=4, max_drafts=2, vocab_size=16, device=torch.device("cpu"))
    arguments: dict[str, Any] = {
        "logits_TV": torch.zeros(3, 16),
        "row_BK1": torch.zeros(1, 3, dtype=torch.int64),
        "draft_ids_BK": torch.zeros(1, 2, dtype=torch.int64),
        "draft_probs_BKV": None,
        "keys": RejectionKeys(*(torch.zeros(3, dtype=torch.int64) for _ in range(3))),
        "out": unwritten_result(1, 2, device="cpu"),
    }
    with pytest.raises(ValueError, match=message):
        acceptor(**(arguments | changes))


@needs_gpu
@pytest.mark.parametrize(
    ("num_requests", "max_drafts", "num_ids"), [(6, 5, 154880), (9, 3, 1037), (9, 3, 7), (3, 0, 64)]
)
@pytest.mark.parametrize("kind", ["plain", "sparse", "hostile", "equal"])
def test_a_gpu_keeps_and_draws_the_same_tokens(num_requests: int, max_drafts: int, num_ids: int, kind: str) -> None:
    drafts = make_drafts(num_requests, max_drafts, num_ids)
    logits_TV, row_BK1 = drafts["logits_TV"], drafts["row_BK1"]
    if kind == "sparse":
        logits_TV[torch.rand(logits_TV.shape) < 0.5] = -torch.inf
    if kind == "hostile":
        logits_TV[0], logits_TV[-1, num_ids // 2] = -torch.inf, torch.nan
        drafts["draft_probs_BKV"][:1, :1] = torch.nan
    if kind == "equal":
        drafts["draft_probs_BKV"] = logits_TV[row_BK1[:, :-1]].softmax(dim=-1)
    drafts["keys"] = RejectionKeys(*(key_T.cuda() for key_T in drafts["keys"]))
    drafts |= {name: value.cuda() for name, value in drafts.items() if isinstance(value, torch.Tensor)}
    acceptor = RejectionAcceptor(
        max_requests=num_requests, max_drafts=max_drafts, vocab_size=num_ids, device=torch.device("cuda")
    )
    for without in ({}, {"greedy_T": None}, {"greedy_T": None, "draft_probs_BKV": None}):
        expected = rejection_accept_ref(**(drafts | without))
        out = unwritten_result(num_requests, max_drafts, device="cuda")
        acceptor(**(drafts | without | {"logits_TV": rows_apart(drafts["logits_TV"])}), out=out)
        assert_same_result(out, expected)
