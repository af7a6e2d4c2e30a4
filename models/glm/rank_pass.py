"""A decoding pass of the target on one GPU: a tensor-parallel rank's slice of every layer, in launches alone.

`GlmTarget` defines what it computes. B = requests, Q = rows of each, T = B * Q, H = hidden, K = positions chosen.
"""

import copy
from collections.abc import Callable, Sequence

import torch

from specdec.kernels.embed_rows import embed_rows
from specdec.kernels.first_entries import first_entries
from specdec.models.glm.layer_launches import LayerLaunches, LayerPages, PassRows
from specdec.models.glm.layer_slice import ModelSlice


class RankPass:
    """Runs passes of one shape.

    Args:
        model: The rank's slice.
        pages: Where each layer keeps its KV.
        launches: Of as many requests.
        rows: What the passes read of their rows, in memory that stays.

    Attributes:
        choice: What the last indexer chose.

    Raises:
        ValueError: The first layer has no indexer, so that nothing would tell it which rows to read.
    """

    def __init__(
        self,
        model: ModelSlice,
        pages: Sequence[LayerPages],
        launches: LayerLaunches,
        rows: PassRows,
    ) -> None:
        if model.layers[0].attention.indexer is None:
            raise ValueError("the first layer has no indexer, and no layer before it could choose for it")
        self._model, self._pages, self._rows = model, pages, rows
        self._launches = launches
        self._x_TH = torch.empty_like(launches.delta_TH)
        self.choice = launches.new_choice(rows.places.count_T)

    def of_requests(self, num_requests: int, rows: PassRows) -> "RankPass":
        """Give passes of so many requests, no more than these are for, in the same memory.

        Args:
            num_requests: B.
            rows: The first of these passes' rows.
        """
        part = copy.copy(self)
        part._launches, part._rows = self._launches.of_requests(num_requests), rows
        part._x_TH = self._x_TH[: len(rows.places.position_T)]
        part.choice = first_entries(self.choice, len(rows.places.position_T))
        return part

    def forward(self, token_T: torch.Tensor, *, when_stored: Callable[[int], None] | None = None) -> torch.Tensor:
        """Run the pass on the current stream, writing the rows' KV.

        Args:
            token_T: Token of each row, i64; anything for padding.
            when_stored: Called with each layer once what stores the rows there was launched; None where nobody asks.

        Returns:
            Hidden states after the final norm, bfloat16 [T, H], in memory that the next pass overwrites.
        """
        launches, vocabulary, x_TH = self._launches, self._model.vocabulary, self._x_TH
        launches.begin(x_TH)
        position_T, first_id = self._rows.places.position_T, vocabulary.first_id
        embed_rows(token_T, position_T, vocabulary.embedding_VH, first_id=first_id, out_TH=launches.delta_TH)
        for number, (layer, pages) in enumerate(zip(self._model.layers, self._pages, strict=True)):
            launches.run(layer, pages, self._rows, self.choice, x_TH)
            if when_stored is not None:
                when_stored(number)
        return launches.add_norm(x_TH, self._model.final_norm)
