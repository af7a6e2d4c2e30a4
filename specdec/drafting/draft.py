"""What a draft source is: it observes what the target computed and proposes the tokens that may follow.

B = requests, T = rows, K = drafts, P = pages of a request, H = hidden, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.request import Request
from specdec.sampling.sampling_rows import SamplingBatch
from specdec.slot_table import Int64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedRows:
    """Rows whose target KV is final: a prompt's chunk, or the last token and the drafts that were kept.

    Rows of one request stand together, in order of position. Arrays are on the host, tensors on the model's device.

    Attributes:
        slot_B: Slot of each request, i64 [B].
        num_rows_B: Its rows, i64 [B], each >= 1.
        position_T: Position t of each row, i64 [T].
        next_token_id_T: x[t+1], i64 [T].
        row_T: Rows of the round's target pass that these are, i64 [T].
        hidden_TH: The target's hidden state of row t after the final norm [T, H].
        page_id_BP: Pages of each request, -1 padded, i64 [B, P].
    """

    slot_B: Int64Array
    num_rows_B: Int64Array
    position_T: Int64Array
    next_token_id_T: Int64Array
    row_T: Int64Array
    hidden_TH: torch.Tensor
    page_id_BP: Int64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftBatch:
    """The requests that want drafts in this round.

    Attributes:
        slot_B: Slot of each request, i64 [B].
        length_B: Known tokens, i64 [B]; the first draft is for this position.
        num_drafts_B: Most drafts wanted, i64 [B], each >= 1.
        page_id_BP: Pages of each request, with room for the drafts, -1 padded, i64 [B, P].
        requests: The requests themselves.
        sampling: How their tokens are drawn.
    """

    slot_B: Int64Array
    length_B: Int64Array
    num_drafts_B: Int64Array
    page_id_BP: Int64Array
    requests: Sequence[Request]
    sampling: SamplingBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafts:
    """Proposed tokens.

    Attributes:
        token_id_BK: i64 [B, K], K no less than any of `num_drafts_B`; beyond `num_drafts_B` any value.
        num_drafts_B: Drafts of each request, i64 [B], at most what was wanted. "No draft" is this length, never an id.
        draft_probs_BKV: The distributions the drafts were drawn from, f32 [B, K, V], for the rejection rule, which the
            other one does not read; NaN for a draft that could not be drawn: neither it nor those behind it count.
            None from a source that does not draw: then each draft has probability 1.
    """

    token_id_BK: Int64Array
    num_drafts_B: Int64Array
    draft_probs_BKV: torch.Tensor | None = None


class DraftSource(Protocol):
    """Where drafts come from. Wrong drafts cost time; they can never change what is emitted.

    Proposals are checked before anything of them is used (`specdec.drafting.draft_check`): a source that breaks the
    rules of `Drafts` fails the requests of the round, with an error that names it. What cannot be checked is that a
    draft was drawn from its `draft_probs_BKV`: the rejection rule relies on it.
    """

    def observe(self, rows: ObservedRows) -> None:
        """Take in final target rows; called after every round, before the next `propose`."""

    def propose(self, batch: DraftBatch) -> Drafts:
        """Propose up to `num_drafts_B` tokens for each request."""
