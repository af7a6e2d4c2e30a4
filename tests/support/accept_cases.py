"""Chains of drafts for the kernels that accept them, and memory for their results."""

import torch

from specdec.kernels.chain_accept import ChainResult


def make_chains(num_requests: int, max_drafts: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Give requests 0 to `max_drafts` drafts: their numbers, i64 [B], and rows of logits, i64 [B, K1]."""
    num_drafts_B = torch.randint(max_drafts + 1, (num_requests,), generator=generator)
    first_row_B = (num_drafts_B + 1).cumsum(0) - num_drafts_B - 1
    return num_drafts_B, first_row_B[:, None] + torch.minimum(torch.arange(max_drafts + 1), num_drafts_B[:, None])


def unwritten_result(num_requests: int, max_drafts: int, *, device: str) -> ChainResult:
    """Memory for a result that holds what no result does."""
    return ChainResult(
        torch.full((num_requests, max_drafts + 1), 77, device=device),
        torch.full((num_requests,), 77, device=device),
        torch.zeros(num_requests, dtype=torch.bool, device=device),
    )


def rows_apart(logits_TV: torch.Tensor) -> torch.Tensor:
    """Copy rows of logits to where NaN lies between them; they begin at multiples of 16 bytes where their ids do."""
    num_ids = logits_TV.shape[1]
    memory = logits_TV.new_full((len(logits_TV), -(-num_ids // 8) * 8 + 8), torch.nan)
    memory[:, :num_ids] = logits_TV
    return memory[:, :num_ids]


def assert_same_result(out: ChainResult, expected: ChainResult) -> None:
    """Compare what was drawn and kept, where there was something to draw."""
    drawable_B = expected.drawable_B
    assert torch.equal(out.drawable_B, drawable_B)
    assert torch.equal(out.token_ids_BK1[drawable_B], expected.token_ids_BK1[drawable_B])
    assert torch.equal(out.num_accepted_B[drawable_B], expected.num_accepted_B[drawable_B])
