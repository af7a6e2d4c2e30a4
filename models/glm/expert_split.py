"""How the experts of a layer are shared by tensor-parallel ranks."""

from enum import StrEnum

from specdec.models.glm.config import GlmConfig

_MIN_SLICE_MULTIPLE = 128  # one block of FP8 scales, and the width that a tile of a matrix product wants


class ExpertSplit(StrEnum):
    """What a rank holds of the experts; the bytes are the same, the work is not.

    By slice every rank computes a part of every chosen expert, so ranks are busy alike whatever is routed. By expert a
    rank computes the chosen ones among its own, whole.
    """

    SLICE = "slice"
    EXPERT = "expert"


def choose_expert_split(config: GlmConfig, tp_size: int) -> ExpertSplit:
    """By slice as long as a slice's width is a multiple of 128, else by expert where the ranks divide the experts.

    A narrower slice would share blocks of FP8 scales with its neighbours. On one rank both are the same. Where neither
    is possible the answer is by slice, which `check_parallel_sizes` refuses.
    """
    width, rest = divmod(config.moe_intermediate_size, tp_size)
    is_wide = rest == 0 and width % _MIN_SLICE_MULTIPLE == 0
    if tp_size == 1 or is_wide or config.num_experts % tp_size:
        return ExpertSplit.SLICE
    return ExpertSplit.EXPERT
