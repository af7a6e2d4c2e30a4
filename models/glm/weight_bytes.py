"""Bytes of the weights that one tensor-parallel rank holds, by part of the model, from the config alone.

The tensors are those of the checkpoint's manifest. Ranks share rows of the embedding, the head, q_b, kv_b, gate and up,
and columns of o and down; every other tensor is whole on every rank.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch

from specdec.kernels.block_fp8 import BLOCK_SIZE
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.manifest import Component, derive_manifest

_SCALE_BYTES = 4
# By the part of a tensor's name in front of ".weight".
_SHARED_AXIS = {
    **dict.fromkeys(("embed_tokens", "lm_head", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
_FLOAT32_MODULES = ("gate", "k_norm")  # the router with its bias, and the index key norm


class WeightFormat(StrEnum):
    """How weights lie in memory; FP8 is e4m3 in blocks of 128 x 128 with float32 scales, the rest bfloat16."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


def stored_weight_format(config: GlmConfig) -> WeightFormat:
    """The format of the checkpoint; float16 takes the bytes of bfloat16."""
    if config.weight_block_size is not None:
        return WeightFormat.FP8
    return WeightFormat.FLOAT32 if config.dtype is torch.float32 else WeightFormat.BFLOAT16


class WeightKind(NamedTuple):
    """Weights that take the same bytes on a rank.

    Attributes:
        module: The part of the name in front of ".weight", such as "q_b_proj".
        is_quantised: An FP8 checkpoint holds it in FP8.
        is_expert: It belongs to one of the routed experts.
    """

    component: Component
    module: str
    shape: tuple[int, ...]
    is_quantised: bool
    is_expert: bool


@dataclass(frozen=True, slots=True)
class WeightCensus:
    """How many weights of each kind a model has: a release has 59,585 of them, of a few dozen kinds."""

    num_weights: Mapping[WeightKind, int]

    def rank_bytes(
        self, weight_format: WeightFormat, *, tp_size: int, expert_split: ExpertSplit
    ) -> dict[Component, int]:
        """Bytes of one rank. Where a share ends inside an FP8 block, ranks differ by scales: the most are counted.

        Args:
            weight_format: How the weights lie in memory.
            tp_size: Ranks that share them, a size that `check_parallel_sizes` accepts.
            expert_split: How they share the experts.
        """
        sizes = dict.fromkeys(Component, 0)
        for kind, num_weights in self.num_weights.items():
            if kind.is_expert and expert_split is ExpertSplit.EXPERT:
                sizes[kind.component] += num_weights // tp_size * _share_bytes(kind, weight_format, 1)
            else:
                sizes[kind.component] += num_weights * _share_bytes(kind, weight_format, tp_size)
        return sizes


def count_weights(config: GlmConfig, *, with_mtp: bool) -> WeightCensus:
    """Count the weights of a model by kind; its own format does not matter."""
    quantised = replace(config, weight_block_size=(BLOCK_SIZE, BLOCK_SIZE))
    kinds = Counter(
        WeightKind(
            tensor.component,
            tensor.name.rsplit(".", 2)[-2],
            tensor.shape,
            tensor.is_quantised,
            ".experts." in tensor.name,
        )
        for tensor in derive_manifest(quantised, with_mtp=with_mtp).tensors.values()
        if not tensor.is_scale
    )
    return WeightCensus(kinds)


def _share_bytes(kind: WeightKind, weight_format: WeightFormat, tp_size: int) -> int:
    """Bytes of a rank's share of one weight, its scales included."""
    shape = list(kind.shape)
    num_blocks = [-(-size // BLOCK_SIZE) for size in shape]
    axis = _SHARED_AXIS.get(kind.module)
    if axis is not None:
        num_blocks[axis] = _most_blocks(shape[axis], tp_size)
        shape[axis] //= tp_size
    if weight_format is WeightFormat.FP8 and kind.is_quantised:
        return math.prod(shape) + _SCALE_BYTES * math.prod(num_blocks)
    is_float32 = weight_format is WeightFormat.FLOAT32 or kind.module in _FLOAT32_MODULES
    return math.prod(shape) * (4 if is_float32 else 2)


def _most_blocks(size: int, tp_size: int) -> int:
    """Blocks of an axis that a rank's share touches, on the rank where it touches most."""
    share = size // tp_size
    return max(-(-(rank + 1) * share // BLOCK_SIZE) - rank * share // BLOCK_SIZE for rank in range(tp_size))
