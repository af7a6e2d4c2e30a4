"""The target's logits over a given sequence, outside the decode rounds."""

from collections.abc import Iterator

import numpy as np
import torch

from specdec.core import EngineCore
from specdec.models.glm.trace import ForwardTrace
from specdec.ranks.worker import Verified, VerifyTask
from specdec.result import Score
from specdec.round_rows import RoundRows
from specdec.slot_table import Int64Array


def score_tokens(core: EngineCore, token_ids: Int64Array, *, with_logits: bool) -> Score:
    """Give the log-probability of every token but the first.

    Args:
        core: Runs the passes.
        token_ids: i64 [T].
        with_logits: Whether to keep the logits of every row: 4 bytes x T x vocabulary.

    Raises:
        OutOfPagesError: Too few pages are free, cached prefixes evicted.
    """
    logprobs: list[float] = []
    logits: list[torch.Tensor] = []
    for begin, verified in _passes(core, token_ids, is_traced=False):
        logits_TV = verified.prompt_logits_TV
        if with_logits:
            logits.append(logits_TV.cpu())
        next_id_T = torch.from_numpy(token_ids[begin + 1 : begin + 1 + len(logits_TV)]).to(logits_TV.device)
        rows_TV = logits_TV[: len(next_id_T)].log_softmax(dim=-1)
        logprobs += rows_TV.gather(1, next_id_T[:, None])[:, 0].tolist()
    return Score(
        token_ids=tuple(token_ids.tolist()),
        logprobs=tuple(logprobs),
        logits_TV=torch.cat(logits).numpy() if with_logits else None,
    )


def trace_tokens(core: EngineCore, token_ids: Int64Array) -> tuple[torch.Tensor, ForwardTrace]:
    """Give the logits of every row, f32 [T, V], and what the model chose in them.

    Raises:
        OutOfPagesError: Too few pages are free, cached prefixes evicted.
    """
    passes = [verified for _, verified in _passes(core, token_ids, is_traced=True)]
    logits_TV = torch.cat([verified.prompt_logits_TV for verified in passes]).cpu()
    return logits_TV, ForwardTrace.joined([verified.trace for verified in passes if verified.trace is not None])


def _passes(core: EngineCore, token_ids: Int64Array, *, is_traced: bool) -> Iterator[tuple[int, Verified]]:
    """Run the target over the sequence in chunks, on pages that are returned afterwards; gives where each began."""
    scheduler, page_size = core.scheduler, core.slots.page_size
    num_pages = -(-len(token_ids) // page_size)
    scheduler.make_room(num_pages)
    pages = scheduler.allocator.allocate(num_pages)
    try:
        for begin in range(0, len(token_ids), scheduler.prefill_chunk_tokens):
            chunk = token_ids[begin : begin + scheduler.prefill_chunk_tokens]
            row_T = np.arange(len(chunk))
            rows = RoundRows(
                first_row_B=np.zeros(1, dtype=np.int64),
                num_rows_B=np.array([len(chunk)]),
                request_index_T=np.zeros(len(chunk), dtype=np.int64),
                rank_T=row_T,
                position_T=begin + row_T,
                token_id_T=chunk,
                page_id_BP=np.array([pages], dtype=np.int64),
            )
            yield begin, core.ranks.verify(VerifyTask.without_drawing(rows, prompt_row_T=row_T, is_traced=is_traced))
    finally:
        scheduler.allocator.release(pages)
