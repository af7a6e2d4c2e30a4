"""Where the emitted runs of a round end, and what that leaves in the slots.

Stops are judged token by token inside a run: a stop id counts before the length limit at the same token, and nothing
behind either is delivered. Requests with stop strings or `min_tokens` are judged by their own `OutputJudge`.

F = requests that draw, K1 = drafts + 1, N = stop ids.
"""

from dataclasses import dataclass

import numpy as np

from specdec.finish import Delivery, FinishReason
from specdec.request import Request
from specdec.slot_table import BoolArray, Int64Array, SlotTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """What a round gave the F requests that drew; they may have left their slots since.

    Attributes:
        slot_F: Slot at the time, i64 [F].
        requests: The requests.
        token_id_FK1: Emitted ids, i64 [F, K1].
        num_delivered_F: Leading ids that are part of the output, i64 [F].
        stopped_F: Whether the last of them is a stop.
        at_limit_F: Whether the output is full.
        delivery_by_index: What the judge said, for the requests that it had to judge.
    """

    slot_F: Int64Array
    requests: list[Request]
    token_id_FK1: Int64Array
    num_delivered_F: Int64Array
    stopped_F: BoolArray
    at_limit_F: BoolArray
    delivery_by_index: dict[int, Delivery]

    @property
    def ended_F(self) -> BoolArray:
        """Whether the request ended."""
        ended_F: BoolArray = self.stopped_F | self.at_limit_F
        return ended_F


def commit(
    slots: SlotTable,
    *,
    slot_F: Int64Array,
    token_id_FK1: Int64Array,
    num_accepted_F: Int64Array,
    num_drafts_F: Int64Array,
) -> Committed:
    """Append each run to its request, up to where it ends, and count how drafting went.

    `length` moves by what is delivered, `computed` by the drafts kept.

    Args:
        slots: The running requests.
        slot_F: Slots of the requests that drew, i64 [F].
        token_id_FK1: Emitted ids, i64 [F, K1]; any value beyond `num_accepted_F` + 1.
        num_accepted_F: Drafts kept, i64 [F].
        num_drafts_F: Drafts judged, i64 [F].
    """
    num_columns = token_id_FK1.shape[1]
    column_K1 = np.arange(num_columns)
    length_F = slots.length_S[slot_F]
    num_emitted_F = num_accepted_F + 1

    is_stop_FK1 = (token_id_FK1[:, :, None] == slots.stop_id_SN[slot_F][:, None, :]).any(axis=-1)
    is_stop_FK1 &= column_K1 < num_emitted_F[:, None]
    to_stop_F = np.where(is_stop_FK1.any(axis=1), is_stop_FK1.argmax(axis=1) + 1, num_columns + 1)
    room_F = slots.limit_S[slot_F] - length_F
    num_delivered_F = np.minimum(np.minimum(num_emitted_F, to_stop_F), room_F)
    stopped_F = to_stop_F == num_delivered_F
    at_limit_F = (room_F == num_delivered_F) & ~stopped_F

    requests = [slots.requests[slot] for slot in slot_F.tolist()]
    delivery_by_index: dict[int, Delivery] = {}
    for f in np.flatnonzero(slots.attended_S[slot_F]).tolist():
        request = requests[f]
        if request.is_judged_by_text:
            delivery = request.judge.push(token_id_FK1[f, : num_emitted_F[f]].tolist())
            delivery_by_index[f] = delivery
            num_delivered_F[f] = delivery.finish.num_delivered
            stopped_F[f] = delivery.finish.finish_reason is FinishReason.STOP
            at_limit_F[f] = delivery.finish.finish_reason is FinishReason.LENGTH
        request.sampling.observe(token_id_FK1[f, : num_delivered_F[f]].tolist())

    slots.token_SX[slot_F[:, None], length_F[:, None] + column_K1] = token_id_FK1
    slots.length_S[slot_F] = length_F + num_delivered_F
    slots.computed_S[slot_F] += num_accepted_F
    slots.decoding_S[slot_F] = True
    slots.num_drafts_S[slot_F] += num_drafts_F > 0
    slots.num_draft_tokens_S[slot_F] += num_drafts_F
    slots.num_accepted_SK[slot_F, : num_columns - 1] += column_K1[:-1] < num_accepted_F[:, None]
    return Committed(
        slot_F=slot_F,
        requests=requests,
        token_id_FK1=token_id_FK1,
        num_delivered_F=num_delivered_F,
        stopped_F=stopped_F,
        at_limit_F=at_limit_F,
        delivery_by_index=delivery_by_index,
    )
