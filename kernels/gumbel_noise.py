"""Random numbers that are a pure function of (seed, choice, stream, position, token id).

    hash  = mix(mix(G * (id + 1)) ^ key)          64 bits, wrap-around
    u     = (top 52 bits of hash + 1/2) / 2**52   float64, in [2**-53, 1 - 2**-53]
    noise = -log(-log(u))                         Gumbel(0, 1)

`argmax(logits + noise)` is then a draw from softmax(logits) (the Gumbel-max trick), and whoever knows the key can
repeat it: no generator has a state, so neither the batch, nor the number of drafts, nor a preemption can move it.
`mix` is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014,
with Stafford's constants) and G its odd golden-ratio increment. The key of a row is built by the same `mix` over the
four other numbers.

T = rows, V = token ids. Integers are exact on every device. The two logarithms are the device's own: equal bits on one
device whatever stands beside an element, last-digit differences between devices.
"""

import functools
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_UINT64 = (1 << 64) - 1
_ONE_BITS = 0x3FF << 52  # float64 1.0
# Elements of one pass: the temporaries of a block stay in a core's cache, or fill a GPU. It cannot change a value.
_BLOCK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}


class NoiseStream(IntEnum):
    """What a random number is for; streams of one request are independent of each other."""

    TARGET = 0  # the target's own draw at a position, which a draft may share
    DRAFT = 1  # the draft's draw under the rejection rule
    COIN = 2  # accept or reject under the rejection rule
    RESIDUAL = 3  # the draw that replaces a rejected draft


def stream_key(*, seed: int, choice: int, stream: NoiseStream) -> int:
    """Give the key of one stream of one choice of a request, to be refined by `position_keys`.

    Args:
        seed: Any integer; taken modulo 2**64.
        choice: Index among the choices of one prompt, >= 0.
        stream: What the numbers are for.

    Returns:
        An integer in 0..2**64 - 1.
    """
    key = _mix_int(seed * GOLDEN)
    key = _mix_int(key ^ (choice * GOLDEN))
    return _mix_int(key ^ ((stream + 1) * GOLDEN))


def position_keys(stream_key_T: npt.NDArray[np.uint64], position_T: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Give the key of each row from the key of its stream and the position of the token to be drawn.

    Args:
        stream_key_T: Values of `stream_key`, u64 [T].
        position_T: Number of tokens that stand before the drawn one, i64 [T], >= 0.

    Returns:
        i64 [T] on the host, the bits of an unsigned number; torch takes it as `key_T` below.
    """
    with np.errstate(over="ignore"):
        key_T = position_T.astype(np.uint64) * np.uint64(GOLDEN) ^ stream_key_T
        key_T = (key_T ^ (key_T >> np.uint64(30))) * np.uint64(MIX_1)
        key_T = (key_T ^ (key_T >> np.uint64(27))) * np.uint64(MIX_2)
        return (key_T ^ (key_T >> np.uint64(31))).view(np.int64)


def uniform_noise(key_T: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Give a uniform number for every token id of every row.

    Args:
        key_T: Row keys, i64 [T].
        num_ids: V; ids are 0..V - 1, and a larger V only appends columns.

    Returns:
        f64 [T, V] on the device of `key_T`, in [2**-53, 1 - 2**-53]: never 0, never 1.
    """
    hash_TV = _mix_(_id_hash(num_ids, key_T.device) ^ key_T[:, None])
    # The 52 bits become the fraction of a float64 in [1, 2): cheaper than a conversion, and the difference is exact.
    fraction_TV = hash_TV.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    return fraction_TV.bitwise_or_(_ONE_BITS).view(torch.float64).sub_(1 - 2.0**-53)


def coins(key_T: torch.Tensor) -> torch.Tensor:
    """Give one uniform number per row, f64 [T], in [2**-53, 1 - 2**-53]: the number of token id 0."""
    return uniform_noise(key_T, 1)[:, 0]


def gumbel_noise(key_T: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Give Gumbel(0, 1) noise for every token id of every row: f64 [T, V], between -3.61 and 36.74."""
    return _negated_gumbel(key_T, num_ids).neg_()


def gumbel_argmax(logits_TV: torch.Tensor, key_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from softmax(logits) by the largest logit + noise.

    Args:
        logits_TV: f32 [T, V]; -inf is never drawn while the row has a finite entry.
        key_T: Row keys, i64 [T].

    Returns:
        Drawn ids i64 [T], the lowest on a tie, and the winning logit + noise f64 [T]: not finite where the row had
        nothing to draw from (all -inf) or held a NaN or +inf.
    """
    num_rows, num_ids = logits_TV.shape
    block = max(1, _BLOCK_ELEMENTS.get(logits_TV.device.type, 1 << 16) // max(1, num_ids))
    if num_rows <= block:
        value_T, token_id_T = logits_TV.double().sub_(_negated_gumbel(key_T, num_ids)).max(dim=-1)
        return token_id_T, value_T
    starts = range(0, num_rows, block)
    drawn = [gumbel_argmax(logits_TV[start : start + block], key_T[start : start + block]) for start in starts]
    return torch.cat([token_id_T for token_id_T, _ in drawn]), torch.cat([value_T for _, value_T in drawn])


def _negated_gumbel(key_T: torch.Tensor, num_ids: int) -> torch.Tensor:
    return uniform_noise(key_T, num_ids).log_().neg_().log_()


def _mix_int(value: int) -> int:
    value &= _UINT64
    value = (value ^ (value >> 30)) * MIX_1 & _UINT64
    value = (value ^ (value >> 27)) * MIX_2 & _UINT64
    return value ^ (value >> 31)


def _mix_(hash_TV: torch.Tensor) -> torch.Tensor:
    """Apply `mix` in place; torch shifts int64 with the sign, so each shift is followed by a mask."""
    shifted_TV = torch.empty_like(hash_TV)
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, 1)):
        torch.bitwise_right_shift(hash_TV, shift, out=shifted_TV)
        hash_TV.bitwise_xor_(shifted_TV.bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            hash_TV.mul_(factor - (1 << 64))
    return hash_TV


@functools.lru_cache(maxsize=8)
def _id_hash(num_ids: int, device: torch.device) -> torch.Tensor:
    """First round over the token ids, i64 [V]: the same for every row, so it is computed once and only read."""
    ids = torch.arange(1, num_ids + 1, dtype=torch.int64, device=device)
    return _mix_(ids.mul_(GOLDEN - (1 << 64)))
