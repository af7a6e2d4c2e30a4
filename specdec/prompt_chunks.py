"""How the prompt tokens of one round are shared by the prompts that are being computed.

Half of them are for the prompt whose turn is earliest, which therefore always goes on. The other half is for the
shortest: of the highest priority, the prompt with the fewest tokens left, then the next. What one half has no use for,
the other takes. With C tokens a round,

- the earliest prompt moves by C / 2 tokens a round at least, whatever arrives behind it, and every prompt is the
  earliest once those before it are done: none starves;
- a prompt of s tokens beside longer ones of its priority is done in 2 s / C rounds: it does not wait for the 100,000
  tokens of a neighbour;
- prompts of equal length are computed one after the other, which ends each of them no later than equal shares would.

B = prompts.
"""

import numpy as np

from specdec.slot_table import Int64Array


def share_chunk(num_left_B: Int64Array, priority_B: Int64Array, *, num_tokens: int) -> Int64Array:
    """Give each prompt its tokens of a round, i64 [B]; together `num_tokens`, or all there are.

    Args:
        num_left_B: Tokens to compute, each >= 1, the prompt with the earliest turn first.
        priority_B: Priorities; a lower number is the higher priority.
        num_tokens: Most tokens of the round, >= 1.
    """
    first_half = min(int(num_left_B[0]), num_tokens - num_tokens // 2)
    others = 1 + np.lexsort((num_left_B[1:], priority_B[1:]))
    num_left_O = num_left_B[others]
    before_O = np.cumsum(num_left_O) - num_left_O
    share_B = np.zeros_like(num_left_B)
    share_B[others] = np.clip(num_tokens - first_half - before_O, 0, num_left_O)
    share_B[0] = min(int(num_left_B[0]), num_tokens - int(share_B.sum()))
    return share_B
