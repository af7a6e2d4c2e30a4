"""Which tokens a request has seen, as its penalties count them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenTokens:
    """The ids of one history, each once. N = ids."""

    token_id_N: npt.NDArray[np.int64]
    output_count_N: npt.NDArray[np.float32]  # times the id was emitted; 0 for an id of the prompt alone


class TokenHistory:
    """Counts of the tokens that one request has emitted, beside the set of its prompt's tokens.

    Args:
        prompt_ids: Seen, but not emitted; empty where no penalty looks at the prompt.
    """

    def __init__(self, prompt_ids: Sequence[int] | npt.NDArray[np.int64] = ()) -> None:
        self._token_id_N = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._count_N = np.zeros(len(self._token_id_N), dtype=np.float32)
        self._place_by_id = {token_id: place for place, token_id in enumerate(self._token_id_N.tolist())}

    def observe(self, token_ids: Iterable[int]) -> None:
        """Count emitted tokens."""
        ids = list(token_ids)
        self._token_id_N, self._count_N = self._with_new(ids)
        for token_id in ids:
            place = self._place_by_id.setdefault(token_id, len(self._place_by_id))
            self._count_N[place] += 1

    def after_drafts(self, drafts: Sequence[int], draft_counts: Iterable[int]) -> Iterator[SeenTokens]:
        """Give the history as it would be if the first n of `drafts` were emitted, for each n of `draft_counts`."""
        token_id_N, known_count_N = self._with_new(drafts)
        place_by_id = {token_id: place for place, token_id in enumerate(token_id_N[len(self._place_by_id) :].tolist())}
        for draft_count in draft_counts:
            count_N = known_count_N.copy()
            num_new = 0  # new ids stand in the order in which they occur, so those seen so far are a beginning
            for token_id in drafts[:draft_count]:
                place = self._place_by_id.get(token_id)
                if place is None:
                    place = len(self._place_by_id) + place_by_id[token_id]
                    num_new = max(num_new, place_by_id[token_id] + 1)
                count_N[place] += 1
            num_seen = len(self._place_by_id) + num_new
            yield SeenTokens(token_id_N=token_id_N[:num_seen], output_count_N=count_N[:num_seen])

    def _with_new(self, token_ids: Iterable[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        new_ids = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self._place_by_id]
        if not new_ids:
            return self._token_id_N, self._count_N
        return (
            np.append(self._token_id_N, np.array(new_ids, dtype=np.int64)),
            np.append(self._count_N, np.zeros(len(new_ids), dtype=np.float32)),
        )
