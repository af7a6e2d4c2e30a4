"""What a forward pass chose, for comparing two passes choice by choice."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch


@dataclass(slots=True)
class ForwardTrace:
    """Discrete choices of one forward pass; hand one in to have it filled.

    Attributes:
        selected_TK: By layer: positions each row attends to, i64 [T, index_topk], -1 padded.
        expert_TC: By sparse layer: experts each row was sent to, best first, i64 [T, C].
        index_margin_T: By full layer that scored, on one rank: by how much the last chosen position outscored the best
            left out, f32 [T]; inf where none was.
        hidden_TH: By layer: the residual stream after the layer, [T, H].
    """

    selected_TK: dict[int, torch.Tensor] = field(default_factory=dict)
    expert_TC: dict[int, torch.Tensor] = field(default_factory=dict)
    index_margin_T: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden_TH: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def joined(cls, passes: Sequence["ForwardTrace"]) -> "ForwardTrace":
        """Join the traces of passes over consecutive rows; a layer that did not score in the first is joined as is."""
        whole = cls()
        for choices in fields(cls):
            parts = [getattr(each, choices.name) for each in passes]
            getattr(whole, choices.name).update(
                {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}
            )
        return whole
