"""The token that each row of hidden states draws, on a GPU: the head and the choice, without a word to the host.

    greedy    argmax of the logits, which are not written
    drawn     argmax of logits / temperature + noise; a greedy row among them takes the argmax of its logits

T = rows, H = hidden, V = vocabulary ids. `transform_logits` and `verify_sampled` define it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec.kernels.chain_accept import ChainAcceptor, ChainResult
from specdec.models.glm.rank_head import RankHead


class DrawnTokens(NamedTuple):
    """What rows drew.

    Attributes:
        token_T: i64, the same on every rank.
        is_drawn_T: bool; False where there was nothing to draw: logits that are not finite.
    """

    token_T: torch.Tensor
    is_drawn_T: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNoise:
    """How rows draw that are not all greedy.

    Attributes:
        key_T: Noise keys, i64.
        temperature_T: float32; of a greedy row, 1.
        greedy_T: bool.
    """

    key_T: torch.Tensor
    temperature_T: torch.Tensor
    greedy_T: torch.Tensor


class TokenDraw:
    """Draws, for one stream.

    Args:
        head: Of the rank.
        max_rows: Most rows of a call.
        vocab_size: V.
        device: Of the rows.
        with_noise: Whether rows draw with noise; then the logits of all ranks are gathered.
    """

    def __init__(
        self, head: RankHead, *, max_rows: int, vocab_size: int, device: torch.device, with_noise: bool
    ) -> None:
        self._head = head
        self._acceptor: ChainAcceptor | None = None
        if with_noise:
            self._acceptor = ChainAcceptor(
                max_requests=max_rows, max_drafts=0, vocab_size=vocab_size, dtype=torch.float32, device=device
            )
            self._row_T1 = torch.arange(max_rows, device=device)[:, None]
            self._no_drafts_T0 = torch.empty((max_rows, 0), dtype=torch.int64, device=device)

    def __call__(self, hidden_TH: torch.Tensor, noise: RowNoise | None) -> DrawnTokens:
        """Draw, on the current stream.

        Args:
            hidden_TH: After the final norm, bfloat16, contiguous.
            noise: Of the rows; None where all are greedy.
        """
        if noise is None:
            return DrawnTokens(*self._head.best(hidden_TH))
        assert self._acceptor is not None
        num_rows = len(hidden_TH)
        logits_TV = self._head.logits(hidden_TH).div_(noise.temperature_T[:, None])
        drawn = ChainResult(
            token_ids_BK1=noise.key_T.new_empty((num_rows, 1)),
            num_accepted_B=noise.key_T.new_empty(num_rows),
            drawable_B=noise.greedy_T.new_empty(num_rows),
        )
        self._acceptor(
            logits_TV, self._row_T1[:num_rows], self._no_drafts_T0[:num_rows],
            key_T=noise.key_T, greedy_T=noise.greedy_T, out=drawn,
        )  # fmt: skip
        return DrawnTokens(drawn.token_ids_BK1[:, 0], drawn.drawable_B)
