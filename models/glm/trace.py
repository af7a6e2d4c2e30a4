"""What a forward pass chose, for comparing two passes choice by choice."""

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class ForwardTrace:
    """Discrete choices of one forward pass; hand one in to have it filled.

    Attributes:
        selected_TK: By layer: positions each row attends to, i64 [T, index_topk], -1 padded.
        expert_TC: By sparse layer: experts each row was sent to, best first, i64 [T, C].
        hidden_TH: By layer: the residual stream after the layer, [T, H].
    """

    selected_TK: dict[int, torch.Tensor] = field(default_factory=dict)
    expert_TC: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden_TH: dict[int, torch.Tensor] = field(default_factory=dict)
