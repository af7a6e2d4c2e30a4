"""What grammars allow in the rows of one verify, as arrays that travel to every rank.

One process knows the grammars and where each reply stands in its own; all ranks draw under the same masks, so that
their own decisions are equal before they agree. A mask is 19 kB for 155,000 ids, and most rows of a batch have the mask
of another one: each travels once.

T = rows looked at, R = those that can be reached, M = different masks, N = (row, id) pairs, X = bytes that hold V bits,
V = vocabulary.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.grammar.llguidance import Stretch, Uint32Array, is_allowed
from specdec.grammar.progress import GrammarProgress, RowParts
from specdec.kernels.logits_transform import AllowedBits, LogitsRules, TokenBans

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarRows:
    """Rows of a verify that are constrained; those that no reply can reach are left out.

    Attributes:
        row_R: Rows inside a grammar, i64 [R].
        mask_R: The mask of each, i64 [R].
        bits_MX: Allowed ids of each mask, u8 [M, X], as in `AllowedBits`.
        banned_row_N: Rows inside a reasoning that must end before the text does, i64 [N].
        banned_id_N: Ids banned there, i64 [N].
    """

    row_R: Int64Array
    mask_R: Int64Array
    bits_MX: npt.NDArray[np.uint8]
    banned_row_N: Int64Array
    banned_id_N: Int64Array

    def restrict(self, rules: LogitsRules, *, device: torch.device) -> LogitsRules:
        """Add these constraints to what else happens to the rows."""
        bans, grammar = rules.bans, None
        if len(self.banned_row_N):
            row_N, token_id_N = (torch.from_numpy(each).to(device) for each in (self.banned_row_N, self.banned_id_N))
            if bans is not None:
                row_N, token_id_N = torch.cat((bans.row_N, row_N)), torch.cat((bans.token_id_N, token_id_N))
            bans = TokenBans(row_N=row_N, token_id_N=token_id_N)
        if len(self.row_R):
            row_R, mask_R = (torch.from_numpy(each).to(device) for each in (self.row_R, self.mask_R))
            grammar = AllowedBits(row_R=row_R, bits_RX=torch.from_numpy(self.bits_MX).to(device)[mask_R])
        return replace(rules, bans=bans, grammar=grammar)


def grammar_rows(progress_F: Sequence[GrammarProgress | None], drafts: Sequence[Sequence[int]]) -> GrammarRows | None:
    """Find what the rows that verify `drafts` may draw; None where nothing is constrained.

    Args:
        progress_F: The place of each request's reply; None where it has no grammar. Stays as it is.
        drafts: Drafts of each request, which has one row more.
    """
    replies = []
    first_row, num_masked = 0, 0
    for progress, draft_ids in zip(progress_F, drafts, strict=True):
        if progress is not None:
            replies.append(_Reply(progress, progress.parts_of(draft_ids), draft_ids, first_row, num_masked))
            num_masked += replies[-1].num_masked
        first_row += len(draft_ids) + 1
    if not replies:
        return None
    vocabulary = replies[0].progress.matcher.vocabulary  # the one of all
    word_TW = np.zeros((num_masked, vocabulary.num_words), dtype=np.uint32)
    stretches = [
        Stretch(reply.progress.matcher, reply.first_masked, reply.parts.draft_ids)
        for reply in replies
        if reply.parts.num_grammar
    ]
    vocabulary.fill(stretches, word_TW)
    num_bytes = -(-vocabulary.end_id // 8)
    rows, masks, bans = [], [], []
    mask_by_bits: dict[bytes, int] = {}
    for reply in replies:
        num_reasoning = reply.parts.num_reasoning
        early_ids = sorted(reply.progress.early_ids)
        bans += [(reply.first_row + row, token_id) for row in range(num_reasoning) for token_id in early_ids]
        for place in range(_allow_ends(reply, word_TW, end_id=vocabulary.end_id)):
            bits = word_TW[reply.first_masked + place].tobytes()[:num_bytes]
            rows.append(reply.first_row + num_reasoning + place)
            masks.append(mask_by_bits.setdefault(bits, len(mask_by_bits)))
    banned_N2 = np.array(bans, dtype=np.int64).reshape(-1, 2)
    return GrammarRows(
        row_R=np.array(rows, dtype=np.int64),
        mask_R=np.array(masks, dtype=np.int64),
        bits_MX=np.frombuffer(b"".join(mask_by_bits), dtype=np.uint8).reshape(-1, num_bytes).copy(),
        banned_row_N=banned_N2[:, 0].copy(),
        banned_id_N=banned_N2[:, 1].copy(),
    )


class _Reply(NamedTuple):
    """One reply with a grammar, its first row in the verify, and the first of the rows that get a mask."""

    progress: GrammarProgress
    parts: RowParts
    draft_ids: Sequence[int]
    first_row: int
    first_masked: int

    @property
    def num_masked(self) -> int:
        return self.parts.num_grammar + self.parts.num_ended


def _allow_ends(reply: _Reply, word_TW: Uint32Array, *, end_id: int) -> int:
    """Allow the ids that end the text where it may end, and nowhere else; gives how many masked rows can be reached."""
    parts = reply.parts
    word_RW = word_TW[reply.first_masked : reply.first_masked + reply.num_masked]
    column_E, end_E = _bits_of(reply.progress.end_ids)
    may_end_R = word_RW[:, end_id >> 5] >> (end_id & 31) & 1
    may_end_R[parts.num_grammar :] = 1
    word_RW[:, column_E] = np.where(may_end_R[:, None], word_RW[:, column_E] | end_E, word_RW[:, column_E] & ~end_E)
    judged = reply.draft_ids[len(reply.draft_ids) + 1 - len(word_RW) :] if len(word_RW) else ()
    for place, draft_id in enumerate(judged):
        if not is_allowed(word_RW[place], draft_id):
            return place + 1
    return len(word_RW)


@functools.lru_cache(maxsize=256)
def _bits_of(token_ids: frozenset[int]) -> tuple[Int64Array, Uint32Array]:
    """Give the words that hold the bits of some ids, and those bits in each."""
    bits: dict[int, int] = {}
    for token_id in token_ids:
        bits[token_id >> 5] = bits.get(token_id >> 5, 0) | 1 << (token_id & 31)
    return np.array(list(bits), dtype=np.int64), np.array(list(bits.values()), dtype=np.uint32)
