"""Whether a draft source keeps to its contract, asked before anything of a proposal is written.

B = requests, K = drafts, V = vocabulary.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from specdec.drafting.draft import DraftBatch, Drafts
from specdec.errors import ConfigError, SpecdecError
from specdec.slot_table import BoolArray, Int64Array

_MAX_MASS_ERROR = 1e-2  # far above the rounding of a softmax in float32, far below a distribution that was not divided


def check_source(source: object) -> None:
    """Refuse what is no draft source, before it is asked for anything.

    Raises:
        ConfigError: It lacks a method of `DraftSource`.
    """
    missing = [name for name in ("observe", "propose") if not callable(getattr(source, name, None))]
    if missing:
        raise ConfigError(
            f"draft_source must have the methods observe and propose of DraftSource, got {type(source).__name__} "
            f"without {' and '.join(missing)}"
        )


def check_drafts(proposed: Drafts, wanted: DraftBatch, *, source: str, vocab_size: int, reads_probs: bool) -> Drafts:
    """Give the drafts that may be verified: those proposed, up to the first that its source could not draw.

    Args:
        proposed: What the source gave, whatever its annotations say.
        wanted: What it was asked for.
        source: Its name, for errors.
        vocab_size: Ids are 0..vocab_size - 1.
        reads_probs: Whether the acceptance rule reads `draft_probs_BKV`.

    Returns:
        Drafts with a column for each draft of the longest run, and no more; no distributions where nothing reads them.

    Raises:
        SpecdecError: A shape, a count, an id or a distribution is not what `Drafts` says.
    """
    if not isinstance(proposed, Drafts):
        raise SpecdecError(f"draft source {source} must propose Drafts, got {type(proposed).__name__}")
    num_drafts_B = _integers(proposed.num_drafts_B, "num_drafts_B", num_dims=1, wanted=wanted, source=source)
    is_wrong_B = _unsigned(num_drafts_B) > _unsigned(wanted.num_drafts_B)
    if is_wrong_B.any():
        b = int(is_wrong_B.argmax())
        raise SpecdecError(
            f"draft source {source}: request {wanted.requests[b].request_id} must get 0..{wanted.num_drafts_B[b]} "
            f"drafts, got {num_drafts_B[b]}"
        )
    most = int(num_drafts_B.max())
    token_id_BK = _integers(proposed.token_id_BK, "token_id_BK", num_dims=2, wanted=wanted, source=source)[:, :most]
    if token_id_BK.shape[1] < most:
        raise SpecdecError(
            f"draft source {source}: token_id_BK must have a column for each of {most} drafts, got shape "
            f"{proposed.token_id_BK.shape}"
        )
    is_draft_BK = np.arange(most) < num_drafts_B[:, None]
    is_wrong_BK = is_draft_BK & (_unsigned(token_id_BK) >= vocab_size)
    if is_wrong_BK.any():
        raise _wrong_draft(is_wrong_BK, wanted, source, f"an id in 0..{vocab_size - 1}", lambda b, k: token_id_BK[b, k])
    probs_BKV = proposed.draft_probs_BKV if reads_probs and most else None
    if probs_BKV is not None:
        probs_BKV = _floats(probs_BKV, (len(num_drafts_B), most, vocab_size), source=source)
        num_drafts_B = _num_drawn(probs_BKV, is_draft_BK, wanted, source)
    return Drafts(token_id_BK=token_id_BK, num_drafts_B=num_drafts_B, draft_probs_BKV=probs_BKV)


def _integers(values: object, name: str, *, num_dims: int, wanted: DraftBatch, source: str) -> Int64Array:
    num_requests = len(wanted.num_drafts_B)
    if (
        not isinstance(values, np.ndarray)
        or values.dtype.kind not in "iu"
        or values.ndim != num_dims
        or len(values) != num_requests
    ):
        found = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        shape = [num_requests, "K"][:num_dims]
        raise SpecdecError(
            f"draft source {source}: {name} must be an integer array [{', '.join(map(str, shape))}], got {found}"
        )
    return values.astype(np.int64, copy=False)


def _unsigned(values: Int64Array) -> npt.NDArray[np.uint64]:
    """The same bits, in which a negative number is above all others."""
    return values.view(np.uint64)


def _floats(values: object, shape: tuple[int, int, int], *, source: str) -> torch.Tensor:
    """Give the distributions of the first K drafts; a source may leave more behind them."""
    if (
        not isinstance(values, torch.Tensor)
        or values.dtype != torch.float32
        or values.ndim != 3
        or values.shape[1] < shape[1]
        or (values.shape[0], values.shape[2]) != (shape[0], shape[2])
    ):
        found = f"{values.dtype} {list(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
        raise SpecdecError(f"draft source {source}: draft_probs_BKV must be float32 {list(shape)}, got {found}")
    return values[:, : shape[1]]


def _num_drawn(probs_BKV: torch.Tensor, is_draft_BK: BoolArray, wanted: DraftBatch, source: str) -> Int64Array:
    """Count the drafts of each request before the first without a distribution, i64 [B]; reads the device."""
    mass_BK = probs_BKV.sum(dim=-1).cpu().numpy()
    least_BK = probs_BKV.amin(dim=-1).cpu().numpy()
    is_drawn_BK = is_draft_BK & ~np.isnan(mass_BK)
    is_wrong_BK = is_drawn_BK & ((least_BK < 0) | ~(np.abs(mass_BK - 1) <= _MAX_MASS_ERROR))
    if is_wrong_BK.any():
        rule = "drawn from probabilities that are not negative and have the sum 1"
        raise _wrong_draft(
            is_wrong_BK, wanted, source, rule, lambda b, k: f"the sum {mass_BK[b, k]:g}, the least {least_BK[b, k]:g}"
        )
    num_drawn_B: Int64Array = np.cumprod(is_drawn_BK, axis=1, dtype=np.int64).sum(axis=1)
    return num_drawn_B


def _wrong_draft(
    is_wrong_BK: BoolArray, wanted: DraftBatch, source: str, rule: str, value: Callable[[int, int], object]
) -> SpecdecError:
    """Describe the first draft that is wrong."""
    b, k = (int(index) for index in np.argwhere(is_wrong_BK)[0])
    return SpecdecError(
        f"draft source {source}: draft {k} of request {wanted.requests[b].request_id} must be {rule}, got {value(b, k)}"
    )
