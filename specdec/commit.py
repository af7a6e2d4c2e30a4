"""Where the emitted runs of a round end, and what that leaves in the slots.

Stops are judged token by token inside a run: a stop id counts before the length limit at the same token, and nothing
behind either is delivered. Requests with stop strings or `min_tokens` are judged by their own `OutputJudge`.

F = requests that draw, K1 = drafts + 1, N = stop ids.
"""

from typing import NamedTuple

import numpy as np

from specdec.request import Request
from specdec.sampling.finish import Delivery, FinishReason
from specdec.slot_table import BoolArray, Int64Array, SlotTable

_BONUS_TOKEN = np.array(1)  # numpy would make an array of an int in every call


class Committed(NamedTuple):
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
    requests: tuple[Request, ...]
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
    length_F = slots.length_S[slot_F]
    num_emitted_F = num_accepted_F + _BONUS_TOKEN
    room_F = slots.limit_S[slot_F] - length_F
    num_delivered_F = np.minimum(num_emitted_F, room_F)
    stopped_F = np.zeros(len(slot_F), dtype=np.bool_)

    if slots.may_stop(token_id_FK1):
        is_stop_FK1 = (token_id_FK1[:, :, None] == slots.stop_id_SN[slot_F][:, None, :]).any(axis=-1)
        for f in np.flatnonzero(is_stop_FK1.any(axis=1)).tolist():
            to_stop = int(is_stop_FK1[f].argmax()) + 1
            if to_stop <= num_delivered_F[f]:
                num_delivered_F[f] = to_stop
                stopped_F[f] = True
    at_limit_F = (room_F == num_delivered_F) > stopped_F

    requests = slots.requests_at(slot_F)
    delivery_by_index: dict[int, Delivery] = {}
    attended = np.flatnonzero(slots.attended_S[slot_F]).tolist() if slots.num_attended else []
    for f in attended:
        request = requests[f]
        if request.is_judged_by_text:
            delivery = request.judge.push(token_id_FK1[f, : num_emitted_F[f]].tolist())
            delivery_by_index[f] = delivery
            num_delivered_F[f] = delivery.finish.num_delivered
            stopped_F[f] = delivery.finish.finish_reason is FinishReason.STOP
            at_limit_F[f] = delivery.finish.finish_reason is FinishReason.LENGTH
        delivered = token_id_FK1[f, : num_delivered_F[f]].tolist()
        request.sampling.observe(delivered)
        if request.grammar is not None:
            request.grammar.observe(delivered)

    first_F = slots.first_token_S[slot_F] + length_F
    slots.token[first_F[:, None] + slots.column_K1[: token_id_FK1.shape[1]]] = token_id_FK1
    slots.length_S[slot_F] = length_F + num_delivered_F
    slots.computed_S[slot_F] += num_accepted_F
    slots.count_drafts(slot_F, num_drafts_F=num_drafts_F, num_accepted_F=num_accepted_F)
    slots.start_decoding(slot_F)
    return Committed(
        slot_F=slot_F,
        requests=requests,
        token_id_FK1=token_id_FK1,
        num_delivered_F=num_delivered_F,
        stopped_F=stopped_F,
        at_limit_F=at_limit_F,
        delivery_by_index=delivery_by_index,
    )
