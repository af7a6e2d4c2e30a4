"""What ranks decide together: that all can go on, which drafts to embed, which drafts stay.

Every rank computes its own decision from what should be the same numbers. Where a difference would hang or corrupt, the
decision is made on gathered data by a rule with a total order instead, and every rank leaves with the same one.

N = ranks, B = requests, F = requests that draw a token, K1 = drafts + 1.
"""

import hashlib
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from specdec.dcp.communicator import Communicator
from specdec.kernels.errors import RankError

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

T = TypeVar("T")

_HEAD_BYTES = 16  # status, and the digest of the pass
_CAUSE_BYTES = 496  # of an error's text: a message of 512 bytes


def agree_ready(
    communicator: Communicator, error: BaseException | None, *, digest: bytes, device: torch.device
) -> None:
    """Learn whether every rank can begin a pass, and begins the same one, before its first other collective.

    Args:
        communicator: The ranks of the pass.
        error: Why this rank cannot; None where it can.
        digest: 8 bytes of `digest_of` what the pass is made of.
        device: Where the communicator exchanges tensors.

    Raises:
        RankError: Some rank cannot, or would begin another pass than the first rank; on every rank alike, and it names
            the rank and the cause. No rank is waiting in another collective then, so only this pass has failed.
    """
    if communicator.size == 1:
        if error is not None:
            raise error
        return
    cause = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:_CAUSE_BYTES]
    message = np.zeros(_HEAD_BYTES + _CAUSE_BYTES, dtype=np.uint8)
    message[0] = error is not None
    message[8:_HEAD_BYTES] = np.frombuffer(digest, dtype=np.uint8)
    message[_HEAD_BYTES : _HEAD_BYTES + len(cause)] = np.frombuffer(cause, dtype=np.uint8)
    # Not `numpy(force=True)`: on a GPU that waits for the ranks with Python's lock held, so that no other thread could
    # notice a lost one.
    gathered_N = communicator.all_gather(torch.from_numpy(message).to(device)).cpu().numpy()
    failed = np.flatnonzero(gathered_N[:, 0])
    if len(failed):
        first = int(failed[0])
        text = gathered_N[first, _HEAD_BYTES:].tobytes().rstrip(b"\0").decode(errors="replace")
        raise RankError(f"{communicator.name} rank {first} cannot run this pass: {text}") from error
    others = np.flatnonzero((gathered_N[:, 8:_HEAD_BYTES] != gathered_N[0, 8:_HEAD_BYTES]).any(axis=1))
    if len(others):
        raise RankError(
            f"{communicator.name} ranks {others.tolist()} were told another pass than rank 0 (their digests differ): "
            "it is dropped and nothing of it was run"
        )


class LostPrefixError(RankError):
    """Some rank has not stored all of the prior context of a pass: it is dropped before anything of it was run.

    Attributes:
        num_rows_B: Leading rows of each request that every rank has, i64 [B].
    """

    def __init__(self, message: str, num_rows_B: Int64Array) -> None:
        super().__init__(message)
        self.num_rows_B = num_rows_B


def agree_prefix(
    communicator: Communicator, num_stored_B: Int64Array, num_wanted_B: Int64Array, *, device: torch.device
) -> None:
    """Learn whether every rank has stored the prior context that a pass will read.

    What each rank has stored of its own layers is one count a request, so one exchange tells all ranks the prefix that
    they have in common and the size of every layer's broadcast, before the first of them.

    Args:
        communicator: The ranks that share the layers.
        num_stored_B: Leading rows that this rank has stored, i64 [B].
        num_wanted_B: Leading rows that the pass will read, i64 [B], the same on every rank.
        device: Where the communicator exchanges tensors.

    Raises:
        LostPrefixError: Some rank has less, on every rank alike; it names the rank and holds the common prefix.
    """
    stored_NB = communicator.all_gather(torch.from_numpy(num_stored_B).to(device)).cpu().numpy()
    num_common_B = np.minimum(stored_NB.min(axis=0), num_wanted_B)
    short = np.flatnonzero(num_common_B < num_wanted_B)
    if len(short):
        first = int(short[0])
        raise LostPrefixError(
            f"{communicator.name} rank {int(stored_NB[:, first].argmin())} has stored {int(num_common_B[first])} rows "
            f"of a prior context of {int(num_wanted_B[first])}: the pass is dropped, to compute the others again",
            num_common_B,
        )


def agree_drafts(communicator: Communicator, value_B: torch.Tensor, token_id_B: torch.Tensor) -> torch.Tensor:
    """Choose one draft a request: the highest value of any rank, then the lowest id; i64 [B], the same on every rank.

    Args:
        communicator: The ranks that draft.
        value_B: What each rank's own draft scored, f32 [B]; NaN counts as lower than any number.
        token_id_B: Its own draft, i64 [B].
    """
    if communicator.size == 1:
        return token_id_B
    message_B2 = torch.stack((value_B.double(), token_id_B.double()), dim=1)  # ids are far below 2**53
    value_NB, id_NB = communicator.all_gather(message_B2).unbind(-1)
    value_NB = value_NB.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    is_best_NB = value_NB == value_NB.amax(dim=0)
    return id_NB.masked_fill(~is_best_NB, torch.inf).amin(dim=0).long()


class AgreedAcceptance(NamedTuple):
    """The decision every rank leaves with, and what each had decided alone.

    Attributes:
        token_id_FK1: Emitted ids, i64 [F, K1]; -1 beyond `num_accepted_F` + 1.
        num_accepted_F: Drafts kept, i64 [F].
        drawable_F: Whether every rank could draw, bool [F].
        agrees_NF: Whether a rank's own decision was the first rank's, bool [N, F].
    """

    token_id_FK1: Int64Array
    num_accepted_F: Int64Array
    drawable_F: BoolArray
    agrees_NF: BoolArray


def agree_acceptance(
    communicator: Communicator,
    *,
    digest: bytes,
    token_id_FK1: torch.Tensor,
    num_accepted_F: torch.Tensor,
    drawable_F: torch.Tensor,
) -> AgreedAcceptance:
    """Decide what is emitted: the fewest drafts any rank kept, and the first rank's ids up to there.

    Where the first rank had kept more, the last emitted id is its draft, which it judged to be the target's own token.

    Args:
        communicator: The ranks that verified.
        digest: 8 bytes of `digest_of` everything the ranks verified.
        token_id_FK1: This rank's ids, i64 [F, K1]; -1 beyond `num_accepted_F` + 1.
        num_accepted_F: Drafts this rank kept, i64 [F].
        drawable_F: Whether it could draw, bool [F].

    Raises:
        RankError: The ranks verified different inputs, on every rank alike; nothing has been decided.
    """
    num_requests, num_columns = token_id_FK1.shape
    head = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(token_id_FK1.device)
    message = torch.cat((head, num_accepted_F, drawable_F.long(), token_id_FK1.flatten()))
    gathered_NX = communicator.all_gather(message).cpu().numpy()
    if (gathered_NX[:, 0] != gathered_NX[0, 0]).any():
        ranks = np.flatnonzero(gathered_NX[:, 0] != gathered_NX[0, 0]).tolist()
        raise RankError(
            f"{communicator.name} ranks {ranks} verified other inputs than rank 0 (their digests differ): the round is "
            "dropped and nothing of it was emitted"
        )
    accepted_NF, drawable_NF, ids_NX = np.split(gathered_NX[:, 1:], (num_requests, 2 * num_requests), axis=1)
    ids_NFK1 = ids_NX.reshape(-1, num_requests, num_columns)
    num_agreed_F = accepted_NF.min(axis=0)
    is_emitted_FK1 = np.arange(num_columns) <= num_agreed_F[:, None]
    return AgreedAcceptance(
        token_id_FK1=np.where(is_emitted_FK1, ids_NFK1[0], -1),
        num_accepted_F=num_agreed_F,
        drawable_F=drawable_NF.min(axis=0) > 0,
        agrees_NF=(accepted_NF == accepted_NF[0])
        & (ids_NFK1 == ids_NFK1[0]).all(axis=-1)
        & (drawable_NF == drawable_NF[0]),
    )


def gather_objects(communicator: Communicator, value: T, *, device: torch.device) -> list[T]:
    """Give every rank's value, by rank; for reports, not for the rounds."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    size_N = communicator.all_gather(torch.tensor([len(data)], device=device))[:, 0].tolist()
    padded = torch.zeros(max(size_N), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    rows = communicator.all_gather(padded).cpu()
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, size_N, strict=True)]


def arrays_in(value: object) -> Iterator[npt.NDArray[np.generic]]:
    """Find the arrays that a task is made of: in records and tuples of any depth, in order."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from arrays_in(item)
    elif is_dataclass(value):
        for each in fields(value):
            yield from arrays_in(getattr(value, each.name))


def digest_of(arrays: Iterable[npt.NDArray[np.generic]]) -> bytes:
    """Digest arrays with their shapes and dtypes: 8 bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
