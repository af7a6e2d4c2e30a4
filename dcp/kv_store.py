"""What a model asks of the memory that holds its KV, and how one pass over it is run.

T = query rows, K = selected slots, R = requests, L = latent values, R (behind T) = rope values, D = index head dim.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from specdec.dcp.metadata import BatchMetadata


class KvStore(Protocol):
    """Latents and index keys by model layer. A pass writes a layer's entries before it reads that layer."""

    def write_latent(self, layer: int, latent_TL: torch.Tensor, rope_TR: torch.Tensor, meta: BatchMetadata) -> None:
        """Store the latents of the pass's rows, f32 or bf16."""

    def gather_latent(self, layer: int, rows_TK: torch.Tensor) -> torch.Tensor:
        """Read latents at physical token rows: f32 [T, K, L + R], exact zeros where a row is -1."""

    def write_index_key(self, layer: int, key_TD: torch.Tensor, meta: BatchMetadata) -> None:
        """Store the index keys of the pass's rows, f32 or bf16, for a model layer that has an indexer."""

    def gather_index_keys(self, layer: int, meta: BatchMetadata) -> torch.Tensor:
        """Read the index keys of every request by position: f32 [R, pages * page_size, D]; see `KvPool`."""


class PlacedPass(Protocol):
    """The rows of one pass, placed in a pool."""

    @property
    def rows(self) -> slice:
        """The rows that this rank computes, among those of the pass."""

    @property
    def metadata(self) -> BatchMetadata:
        """Of these rows."""

    @property
    def store(self) -> KvStore:
        """Takes and gives their KV."""

    def run(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run the model over `rows` with `store`; gives what it gives of them, without padding.

        Where ranks share the rows, they meet in collectives, and every rank must run the pass.
        """

    def whole(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Give the rows of the whole pass, where `x_TH` is this rank's; a collective where ranks share them."""
