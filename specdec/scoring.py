"""The target's logits over a given sequence, outside the decode rounds."""

import numpy as np
import torch

from specdec.core import EngineCore
from specdec.result import Score
from specdec.round_rows import RoundRows
from specdec.slot_table import Int64Array
from specdec.worker import VerifyTask


def score_tokens(core: EngineCore, token_ids: Int64Array) -> Score:
    """Run the target over `token_ids` in chunks, on pages that are returned afterwards.

    Raises:
        OutOfPagesError: Too few pages are free, cached prefixes evicted.
    """
    scheduler, page_size = core.scheduler, core.slots.page_size
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
    chunk = token_ids[begin : begin + core.scheduler.prefill_chunk_tokens]
    row_T = np.arange(len(chunk))
    return core.ranks.verify(
        VerifyTask.without_drawing(
            RoundRows(
                first_row_B=np.zeros(1, dtype=np.int64),
                num_rows_B=np.array([len(chunk)]),
                request_index_T=np.zeros(len(chunk), dtype=np.int64),
                rank_T=row_T,
                position_T=begin + row_T,
                token_id_T=chunk,
                page_id_BP=page_table,
            ),
            prompt_row_T=row_T,
        )
    ).prompt_logits_TV
