"""The target's logits over a given sequence, outside the decode rounds."""

import numpy as np
import torch

from specdec.core import EngineCore
from specdec.dcp.metadata import build_metadata
from specdec.kernels.row_padding import pad_rows
from specdec.result import Score
from specdec.slot_table import Int64Array


def score_tokens(core: EngineCore, token_ids: Int64Array) -> Score:
    """Run the target over `token_ids` in chunks, on pages that are returned afterwards.

    Raises:
        OutOfPagesError: Too few pages are free, cached prefixes evicted.
    """
    scheduler, pool = core.scheduler, core.pool
    page_size = pool.layout.page_size
    num_pages = -(-len(token_ids) // page_size)
    scheduler.make_room(num_pages)
    pages = scheduler.allocator.allocate(num_pages)
    try:
        chunks = [
            _chunk_logits(core, token_ids, begin, np.array([pages], dtype=np.int64))
            for begin in range(0, len(token_ids), scheduler.prefill_chunk_tokens)
        ]
    finally:
        scheduler.allocator.release(pages)
    logits_TV = torch.cat(chunks)
    next_id_T1 = torch.from_numpy(token_ids[1:]).to(logits_TV.device)[:, None]
    logprob_T = logits_TV[:-1].log_softmax(dim=-1).gather(1, next_id_T1)[:, 0]
    return Score(
        token_ids=tuple(token_ids.tolist()),
        logprobs=tuple(logprob_T.tolist()),
        logits_TV=logits_TV.numpy(force=True),
    )


def _chunk_logits(core: EngineCore, token_ids: Int64Array, begin: int, page_table: Int64Array) -> torch.Tensor:
    pool = core.pool
    chunk = token_ids[begin : begin + core.scheduler.prefill_chunk_tokens]
    metadata = build_metadata(
        geometry=pool.geometry,
        page_size=pool.layout.page_size,
        num_pages=pool.num_pages,
        request_index=np.zeros(len(chunk), dtype=np.int64),
        position=np.arange(begin, begin + len(chunk)),
        page_table=page_table,
        device=pool.device,
    )
    hidden_TH = core.target.forward(pad_rows(torch.from_numpy(chunk).to(pool.device)), metadata=metadata, pool=pool)
    return core.target.logits(hidden_TH[: len(chunk)])
