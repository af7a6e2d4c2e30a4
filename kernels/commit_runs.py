"""Keep the drafts that equal the target's own tokens, and move every request on, without a word to the host.

Request b verified rows 0 .. n - 1: row 0 had its last token, row q its draft q, and drawn_BQ is what the target drew
behind each. a = number of leading rows q < n - 1 with drawn[q] = token[q + 1] and something to draw in row q + 1. Then

    emitted[0 .. a] = drawn[0 .. a],   length += a + 1,   token[0] = drawn[a]
    rows to refresh: a + 1, from where the verified ones began; the last of them gives the next drafts
    n = 1 + min(K, limit - length - 1) for the next round, or 0 once length = limit: the request is done

B = requests, Q = K + 1 rows of each, T = B * Q, K = most drafts. A request without rows (n = 0) is left as it is.
Source: the acceptance rule `sampled` of `specdec.sampling.accept`; lengths as in docs/architecture.md.
"""

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch

from specdec.kernels.tensor_check import check_tensor

_STATE = ("length_B", "limit_B", "num_rows_B", "token_BQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What is known of each request between rounds, all i64.

    Attributes:
        length_B: Known tokens, the last one without KV.
        limit_B: Length at which the request is done.
        num_rows_B: Rows that the next round verifies, 0..Q.
        token_BQ: The last token, then drafts; beyond `num_rows_B` any ids.
    """

    length_B: torch.Tensor
    limit_B: torch.Tensor
    num_rows_B: torch.Tensor
    token_BQ: torch.Tensor

    @classmethod
    def zeros(cls, num_requests: int, rows_per_request: int, *, device: torch.device) -> "RunState":
        """Give the state of no request in any place."""
        return cls(
            **{name: torch.zeros(num_requests, dtype=torch.int64, device=device) for name in _STATE[:3]},
            token_BQ=torch.zeros((num_requests, rows_per_request), dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedRuns:
    """What a round gave, all i64 but `drawable_B`.

    Attributes:
        emitted_BQ: Emitted ids, -1 behind the last; of a request without rows, only -1.
        num_emitted_B: How many.
        drawable_B: bool; False where the first row had nothing to draw: the request must fail.
        start_B: Position of the first row to refresh.
        num_refreshed_B: Rows to refresh.
        last_row_B: The last of them among T rows; of a request without rows, its first.
        num_recycled_B: Draft passes that are wanted behind the refresh: one less than drafts.
        last_position_B: Position of the last token, where draft passes start.
    """

    emitted_BQ: torch.Tensor
    num_emitted_B: torch.Tensor
    drawable_B: torch.Tensor
    start_B: torch.Tensor
    num_refreshed_B: torch.Tensor
    last_row_B: torch.Tensor
    num_recycled_B: torch.Tensor
    last_position_B: torch.Tensor

    @classmethod
    def empty(cls, num_requests: int, rows_per_request: int, *, device: torch.device) -> "CommittedRuns":
        """Give memory for B requests."""
        names = [field.name for field in fields(cls) if field.name not in {"emitted_BQ", "drawable_B"}]
        return cls(
            emitted_BQ=torch.empty((num_requests, rows_per_request), dtype=torch.int64, device=device),
            drawable_B=torch.empty(num_requests, dtype=torch.bool, device=device),
            **{name: torch.empty(num_requests, dtype=torch.int64, device=device) for name in names},
        )


def commit_runs_ref(drawn_T: torch.Tensor, is_drawn_T: torch.Tensor, state: RunState) -> tuple[RunState, CommittedRuns]:
    """Define `commit_runs`: the state afterwards, and what the round gave."""
    num_requests, rows_per_request = state.token_BQ.shape
    drawn_BQ, is_drawn_BQ = drawn_T.view(num_requests, -1), is_drawn_T.view(num_requests, -1)
    q_Q = torch.arange(rows_per_request, device=drawn_T.device)
    has_rows_B = state.num_rows_B > 0
    is_kept_BK = (drawn_BQ[:, :-1] == state.token_BQ[:, 1:]) & (q_Q[1:] < state.num_rows_B[:, None])
    is_kept_BK &= is_drawn_BQ[:, 1:]
    num_accepted_B = is_kept_BK.long().cumprod(dim=1).sum(dim=1)
    is_emitted_BQ = (q_Q <= num_accepted_B[:, None]) & has_rows_B[:, None]
    num_emitted_B = is_emitted_BQ.sum(dim=1)
    length_B = state.length_B + num_emitted_B
    num_drafts_B = (state.limit_B - length_B - 1).clamp(0, rows_per_request - 1)
    num_rows_B = torch.where(has_rows_B & (length_B < state.limit_B), num_drafts_B + 1, 0)
    token_BQ = state.token_BQ.clone()
    last_B = drawn_BQ.gather(1, num_accepted_B[:, None])[:, 0]
    token_BQ[:, 0] = torch.where(has_rows_B, last_B, token_BQ[:, 0])
    return (
        RunState(length_B=length_B, limit_B=state.limit_B, num_rows_B=num_rows_B, token_BQ=token_BQ),
        CommittedRuns(
            emitted_BQ=drawn_BQ.masked_fill(~is_emitted_BQ, -1),
            num_emitted_B=num_emitted_B,
            drawable_B=is_drawn_BQ[:, 0] | ~has_rows_B,
            start_B=state.length_B - 1,
            num_refreshed_B=num_emitted_B,
            last_row_B=torch.arange(num_requests, device=drawn_T.device) * rows_per_request + num_accepted_B,
            num_recycled_B=(num_rows_B - 2).clamp(min=0),
            last_position_B=length_B - 1,
        ),
    )


def commit_runs(drawn_T: torch.Tensor, is_drawn_T: torch.Tensor, state: RunState, *, out: CommittedRuns) -> None:
    """Commit, on a GPU, on the current stream; changes `state` in place.

    Args:
        drawn_T: The target's own token of each row, i64.
        is_drawn_T: False where a row had nothing to draw, bool.
        state: Of the requests.
        out: Written.

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    num_requests, rows_per_request = state.token_BQ.shape
    shapes = {"token_BQ": (num_requests, rows_per_request), "emitted_BQ": (num_requests, rows_per_request)}
    for holder in (state, out):
        for field in fields(holder):
            dtype = torch.bool if field.name == "drawable_B" else torch.int64
            check_tensor(field.name, getattr(holder, field.name), dtype, shapes.get(field.name, (num_requests,)))
    check_tensor("drawn_T", drawn_T, torch.int64, (num_requests * rows_per_request,))
    check_tensor("is_drawn_T", is_drawn_T, torch.bool, (num_requests * rows_per_request,))
    if num_requests:
        commit_runs_kernel()[(num_requests,)](
            drawn_T, is_drawn_T,
            *(getattr(state, field.name) for field in fields(state)),
            *(getattr(out, field.name) for field in fields(out)),
            ROWS=rows_per_request, BLOCK=1 << (rows_per_request - 1).bit_length(),
            STARTS_EARLY=drawn_T.is_cuda, launch_pdl=drawn_T.is_cuda, num_warps=1,
        )  # fmt: skip


@functools.cache
def commit_runs_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        drawn_ptr,  # [B, ROWS]
        is_drawn_ptr,  # [B, ROWS] bool
        length_ptr,  # [B]
        limit_ptr,  # [B]
        num_rows_ptr,  # [B]
        token_ptr,  # [B, ROWS]
        emitted_ptr,  # [B, ROWS]
        num_emitted_ptr,  # [B]
        drawable_ptr,  # [B] bool
        start_ptr,  # [B]
        num_refreshed_ptr,  # [B]
        last_row_ptr,  # [B]
        num_recycled_ptr,  # [B]
        last_position_ptr,  # [B]
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        request = tl.program_id(0)
        q = tl.arange(0, BLOCK)
        row = request * ROWS + q
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        length = tl.load(length_ptr + request)
        limit = tl.load(limit_ptr + request)
        num_rows = tl.load(num_rows_ptr + request)
        drawn = tl.load(drawn_ptr + row, mask=q < ROWS, other=-1)
        is_drawable = tl.load(is_drawn_ptr + request * ROWS) != 0
        is_next_drawn = tl.load(is_drawn_ptr + row + 1, mask=q < ROWS - 1, other=0) != 0
        draft = tl.load(token_ptr + row + 1, mask=q < ROWS - 1, other=-1)  # that the row judges
        # The first row that does not keep its draft ends the run; the last row has none.
        ends = (drawn != draft) | (q + 1 >= num_rows) | ~is_next_drawn
        num_accepted = tl.min(tl.where(ends, q, BLOCK), axis=0)
        has_rows = num_rows > 0
        is_emitted = (q <= num_accepted) & has_rows
        num_emitted = tl.where(has_rows, num_accepted + 1, 0)
        tl.store(emitted_ptr + row, tl.where(is_emitted, drawn, -1), mask=q < ROWS)
        tl.store(num_emitted_ptr + request, num_emitted)
        tl.store(drawable_ptr + request, is_drawable | ~has_rows)
        tl.store(start_ptr + request, length - 1)
        tl.store(num_refreshed_ptr + request, num_emitted)
        tl.store(last_row_ptr + request, request * ROWS + num_accepted)
        length += num_emitted
        num_drafts = tl.minimum(tl.maximum(limit - length - 1, 0), ROWS - 1)
        num_rows = tl.where(has_rows & (length < limit), num_drafts + 1, 0)
        tl.store(num_recycled_ptr + request, tl.maximum(num_rows - 2, 0))
        tl.store(last_position_ptr + request, length - 1)
        tl.store(length_ptr + request, length)
        tl.store(num_rows_ptr + request, num_rows)
        last = tl.sum(tl.where(q == num_accepted, drawn, 0), axis=0)
        tl.store(token_ptr + request * ROWS, last, mask=has_rows)

    return kernel
