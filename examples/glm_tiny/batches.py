"""Draw training batches: windows of running text, and rows packed with whole conversations."""

import random
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .build_data import TokenStream

EXTRA_TOKENS = 6  # beyond the row's length: what up to five draft steps read and predict
# Share of the rows of a batch by stream.
MIXTURE = {"code": 0.31, "test": 0.27, "docs": 0.14, "chat": 0.12, "needle": 0.16}
PACKED = ("chat", "needle")


class BatchSource:
    """Rows of one length, ready on the device.

    Running text is cut at random places. Conversations are kept whole, because a question without its table teaches
    nothing: documents fill a row until the next one does not fit, and a piece of code in front takes up the rest.
    """

    def __init__(
        self,
        streams: Mapping[str, TokenStream],
        *,
        length: int,
        device: str,
        seed: int,
        mixture: Mapping[str, float] = MIXTURE,
    ) -> None:
        self._mixture = dict(mixture)
        self._width = length + EXTRA_TOKENS
        self._device = device
        self._rng = np.random.default_rng(seed)
        self._flat = {
            name: (_to_device(streams[name].ids, device), _to_device(streams[name].weights, device))
            for name in MIXTURE
            if name not in PACKED
        }
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}
        for name in PACKED:
            ids, weights = pack_rows(streams[name], streams["code"], width=self._width, seed=seed)
            self._rows[name] = (_to_device(ids, device), _to_device(weights, device))

    def draw(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Give token ids i64 [num_rows, length + EXTRA_TOKENS] and loss weights f32 of the same shape."""
        counts = self._rng.multinomial(num_rows, list(self._mixture.values()))
        ids, weights = [], []
        for name, count in zip(self._mixture, counts, strict=True):
            if name in PACKED:
                stored_ids, stored_weights = self._rows[name]
                picked = torch.from_numpy(self._rng.integers(0, len(stored_ids), count)).to(self._device)
                ids.append(stored_ids[picked])
                weights.append(stored_weights[picked])
            else:
                flat_ids, flat_weights = self._flat[name]
                starts = torch.from_numpy(self._rng.integers(0, len(flat_ids) - self._width, count)).to(self._device)
                places = starts[:, None] + torch.arange(self._width, device=self._device)
                ids.append(flat_ids[places])
                weights.append(flat_weights[places])
        return torch.cat(ids).long(), torch.cat(weights).float() / 255


def pack_rows(
    stream: TokenStream, filler: TokenStream, *, width: int, seed: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Pack whole documents into rows of `width` tokens in a shuffled order; longer documents are left out."""
    rng = random.Random(seed)
    order = list(range(len(stream.starts) - 1))
    rng.shuffle(order)
    rows: list[list[int]] = [[]]
    used = 0
    for index in order:
        size = int(stream.starts[index + 1] - stream.starts[index])
        if size > width:
            continue
        if used + size > width:
            rows.append([])
            used = 0
        rows[-1].append(index)
        used += size
    ids = np.zeros((len(rows), width), dtype=np.int32)
    weights = np.zeros((len(rows), width), dtype=np.uint8)
    for place, documents in enumerate(rows):
        spans = [slice(stream.starts[d], stream.starts[d + 1]) for d in documents]
        gap = width - sum(s.stop - s.start for s in spans)
        start = rng.randrange(len(filler.ids) - width)
        front = slice(start, start + gap)
        ids[place] = np.concatenate([filler.ids[front], *(stream.ids[s] for s in spans)])
        weights[place] = np.concatenate([filler.weights[front], *(stream.weights[s] for s in spans)])
    return ids, weights


def held_out_rows(stream: TokenStream, *, length: int, max_rows: int, device: str) -> tuple[Tensor, Tensor]:
    """Give the held-out stream as consecutive rows of `length` + EXTRA_TOKENS tokens: ids and weights as in `draw`."""
    width = length + EXTRA_TOKENS
    count = min(max_rows, len(stream.ids) // width)
    ids = torch.from_numpy(stream.ids[: count * width].astype(np.int64)).view(count, width)
    weights = torch.from_numpy(stream.weights[: count * width].astype(np.float32) / 255).view(count, width)
    return ids.to(device), weights.to(device)


def _to_device(values: npt.NDArray[np.generic], device: str) -> Tensor:
    kept = values.astype(np.int32) if values.dtype == np.uint16 else values
    return torch.from_numpy(kept).to(device)
