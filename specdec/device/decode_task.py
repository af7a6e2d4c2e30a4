"""What the host tells the device of a round: who takes part, and which pages they gained.

B = requests, P = pages of the longest, Q = rows of a request, U = pages gained.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdec.sampling.sampling_rows import NoiseOfRequests

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """The requests of the rounds from now on, one a place, place 0 first.

    Attributes:
        source_place_B: The place a request had in the rounds before, whose drafts it keeps, i64; -1 for none.
        length_B: Known tokens, i64.
        limit_B: Tokens at which it ends, i64.
        last_token_B: The last known token, i64.
        page_id_BP: Its pages, -1 behind the last, i64.
        noise: How they draw.
    """

    source_place_B: Int64Array
    length_B: Int64Array
    limit_B: Int64Array
    last_token_B: Int64Array
    page_id_BP: Int64Array
    noise: NoiseOfRequests


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTask:
    """One round.

    Attributes:
        members: Who takes part from now on; None where it is who did before.
        gained_U3: Pages gained since: place, which of the request's pages, page id, i64 [U, 3].
    """

    members: Members | None
    gained_U3: Int64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """What the round gave, by place.

    Attributes:
        token_id_BQ: Emitted ids, i64, -1 behind the last.
        drawable_B: bool; False where no token could be drawn, since logits are not finite.
    """

    token_id_BQ: Int64Array
    drawable_B: npt.NDArray[np.bool_]
