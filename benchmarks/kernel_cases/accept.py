"""The target's token of six rows a request, drafts compared, result left on the device."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_timing import graph_us, num_sets
from benchmarks.kernel_cases.peers import flashinfer_chain
from benchmarks.kernel_cases.rates import memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.chain_accept import ChainAcceptor, ChainResult, chain_accept_ref
from specdec.kernels.gumbel_noise import coins, gumbel_argmax
from specdec.kernels.rejection_accept import RejectionAcceptor, RejectionKeys

_VOCAB, _DRAFTS = 154880, 5


def run() -> list[CaseResult]:
    """Time greedy rows, which only read, drawn rows, whose noise is arithmetic, and the rejection rule."""
    rejections = [_measure_rejection(requests) for requests in (1, 32)]
    return rejections + [
        _measure(requests, dtype, drawn=drawn)
        for drawn in (False, True)
        for dtype in (torch.bfloat16, torch.float32)
        for requests in (1, 32)
    ]


def _measure(num_requests: int, dtype: torch.dtype, *, drawn: bool) -> CaseResult:
    num_rows = num_requests * (_DRAFTS + 1)
    row_BK1 = torch.arange(num_rows, device="cuda").view(num_requests, -1)
    device = row_BK1.device
    acceptor = ChainAcceptor(
        max_requests=num_requests, max_drafts=_DRAFTS, vocab_size=_VOCAB, dtype=dtype, device=device
    )
    num_bytes = num_rows * _VOCAB * dtype.itemsize
    ours: list[Callable[[], object]] = []
    torches: list[Callable[[], object]] = []
    results = []
    for _ in range(num_sets(num_bytes)):
        logits_TV = (3 * torch.randn(num_rows, _VOCAB, device=device)).to(dtype)
        key_T = torch.randint(-(1 << 62), 1 << 62, (num_rows,), device=device) if drawn else None
        drawn_ids = chain_accept_ref(logits_TV, row_BK1.view(-1, 1), row_BK1.view(-1, 1)[:, 1:], key_T=key_T)
        draft_ids_BK = drawn_ids.token_ids_BK1.view(num_requests, -1)[:, :-1].clone()  # what the target draws
        draft_ids_BK[torch.rand(draft_ids_BK.shape, device=device) < 0.2] = 7
        out = _empty_result(row_BK1)
        ours.append(partial(acceptor, logits_TV, row_BK1, draft_ids_BK, key_T=key_T, out=out))
        torches.append(partial(chain_accept_ref, logits_TV, row_BK1, draft_ids_BK, key_T=key_T))
        results.append((out, chain_accept_ref(logits_TV, row_BK1, draft_ids_BK, key_T=key_T)))
    ours_us = graph_us(ours)
    wrong = sum(int((a != b).sum()) for out, expected in results for a, b in zip(out, expected, strict=True))
    return CaseResult(
        case="accept",
        shape=f"B={num_requests} {dtype} {'drawn' if drawn else 'greedy'}".replace("torch.", ""),
        ours_us=ours_us,
        floor_us=memory_us(num_bytes),
        error=float(wrong),
        peers_us={"torch": graph_us(torches, replays=5)},
        note="error: ids that differ from the definition",
    )


def _measure_rejection(num_requests: int) -> CaseResult:
    num_rows = num_requests * (_DRAFTS + 1)
    row_BK1 = torch.arange(num_rows, device="cuda").view(num_requests, -1)
    device = row_BK1.device
    acceptor = RejectionAcceptor(max_requests=num_requests, max_drafts=_DRAFTS, vocab_size=_VOCAB, device=device)
    num_bytes = (num_rows + 2 * num_requests) * _VOCAB * 4  # the row of the token twice, and its draft's
    ours: list[Callable[[], object]] = []
    peers: dict[str, list[Callable[[], object]]] = {"torch": []}
    results = []
    for _ in range(num_sets(num_bytes)):
        logits_TV = 3 * torch.randn(num_rows, _VOCAB, device=device)
        near_BKV = logits_TV.view(num_requests, -1, _VOCAB)[:, :-1] + 0.3 * torch.randn(
            1, _DRAFTS, _VOCAB, device=device
        )
        draft_probs_BKV = near_BKV.softmax(dim=-1)
        draft_ids_BK = torch.multinomial(draft_probs_BKV.view(-1, _VOCAB), 1).view(num_requests, -1)
        keys = RejectionKeys(*(torch.randint(-(1 << 62), 1 << 62, (num_rows,), device=device) for _ in range(3)))
        inputs = (logits_TV, row_BK1, draft_ids_BK, draft_probs_BKV, keys)
        out = _empty_result(row_BK1)
        ours.append(partial(acceptor, *inputs, out=out))
        peers["torch"].append(partial(_reject_in_torch, *inputs))
        if chain := flashinfer_chain(logits_TV.view(num_requests, -1, _VOCAB), draft_ids_BK, draft_probs_BKV):
            peers.setdefault("FlashInfer", []).append(chain.from_logits)
            peers.setdefault("FlashInfer, probabilities given", []).append(chain.from_probs)
        results.append((out, _reject_in_torch(*inputs)))
    ours_us = graph_us(ours)
    wrong = 0
    for out, (kept_B, last_id_B) in results:
        last_id = out.token_ids_BK1.gather(1, out.num_accepted_B[:, None])[:, 0]
        wrong += int(((out.num_accepted_B != kept_B) | (last_id != last_id_B)).sum())
    return CaseResult(
        case="accept",
        shape=f"B={num_requests} float32 rejection",
        ours_us=ours_us,
        floor_us=memory_us(num_bytes),
        error=float(wrong),
        peers_us={name: graph_us(calls, replays=5) for name, calls in peers.items()},
        note="error: requests that differ from torch",
    )


def _reject_in_torch(
    logits_TV: torch.Tensor,
    row_BK1: torch.Tensor,
    draft_ids_BK: torch.Tensor,
    draft_probs_BKV: torch.Tensor,
    keys: RejectionKeys,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give drafts kept and the token behind them as `verify_by_rejection` does, for requests of equally many drafts."""
    probs_TV = logits_TV.softmax(dim=-1)
    target_prob_BK = probs_TV[row_BK1[:, :-1], draft_ids_BK].double()
    draft_prob_BK = draft_probs_BKV.gather(-1, draft_ids_BK[..., None])[..., 0].double()
    kept_BK = coins(keys.coin_T)[row_BK1[:, :-1]] * draft_prob_BK < target_prob_BK
    num_accepted_B = kept_BK.long().cumprod(dim=1).sum(dim=1)
    last_row_B = row_BK1.gather(1, num_accepted_B[:, None])[:, 0]
    all_kept_B = num_accepted_B == _DRAFTS
    request_B = torch.arange(len(row_BK1), device=row_BK1.device)
    rejected_BV = draft_probs_BKV[request_B, num_accepted_B.clamp(max=_DRAFTS - 1)]
    residual_BV = (probs_TV[last_row_B] - rejected_BV).clamp_(min=0.0)
    from_target_B = all_kept_B | ~(residual_BV.amax(dim=-1) > 0)
    scores_BV = torch.where(from_target_B[:, None], logits_TV[last_row_B], residual_BV.log())
    key_B = torch.where(all_kept_B, keys.target_T[last_row_B], keys.residual_T[last_row_B])
    return num_accepted_B, gumbel_argmax(scores_BV, key_B)[0]


def _empty_result(row_BK1: torch.Tensor) -> ChainResult:
    first_B = row_BK1[:, 0]
    return ChainResult(
        torch.empty_like(row_BK1), torch.empty_like(first_B), torch.empty_like(first_B, dtype=torch.bool)
    )
