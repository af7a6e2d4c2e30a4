"""Muon for the matrices, AdamW for the rest, and the balancing of the experts.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) steps by the momentum with its singular values
set to about one; matrices of one shape are handled as one batch.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

from .layers import Layer
from .model import TinyModel

MUON_LR, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.1
ADAM_LR, ADAM_BETAS, ADAM_DECAY = 3e-3, (0.9, 0.95), 0.01
BALANCE_STEP = 5e-3
WARM_UP_STEPS, FLAT_UNTIL, FINAL_FACTOR = 30, 0.4, 0.02
_MUON_NAMES = ("q_a", "q_b", "kv_a", "kv_b", "o", "gate_up", "down", "mtp_eh")


def lr_factor(step: int, progress: float) -> float:
    """Warm up, stay flat, then fall linearly; `progress` is the finished share of the run, 0..1."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    fall = min(1.0, (1.0 - progress) / (1.0 - FLAT_UNTIL))
    return warm * max(FINAL_FACTOR, fall)


class Optimiser:
    """Owns the optimiser state of a model."""

    def __init__(self, model: TinyModel) -> None:
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_indexer = ".indexer." in name
            if name.split(".")[-1] in _MUON_NAMES and not is_indexer:
                by_shape[(parameter.shape[-2], parameter.shape[-1])].append(parameter)
            else:
                rest.append(parameter)
        self._groups = [(parameters, torch.zeros_like(_matrices(parameters))) for parameters in by_shape.values()]
        fused = rest[0].is_cuda
        self._adam = torch.optim.AdamW(rest, lr=ADAM_LR, betas=ADAM_BETAS, weight_decay=ADAM_DECAY, fused=fused)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply the gradients at `factor` of the peak learning rates and clear them."""
        for group in self._adam.param_groups:
            group["lr"] = ADAM_LR * factor
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        lr = MUON_LR * factor
        for parameters, momentum in self._groups:
            gradient = _matrices([p.grad for p in parameters])
            momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
            update = orthogonalise(gradient.lerp(momentum, MUON_MOMENTUM))
            scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            place = 0
            for parameter in parameters:
                count = parameter.numel() // (parameter.shape[-2] * parameter.shape[-1])
                step = update[place : place + count].view_as(parameter)
                parameter.mul_(1 - lr * MUON_DECAY).add_(step, alpha=-lr * scale)
                parameter.grad = None
                place += count


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices [n, rows, columns] near one, by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.transpose(-2, -1)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x if wide else x.transpose(-2, -1)
    return result.to(matrices.dtype)


@torch.no_grad()
def balance_experts(model: TinyModel, loads_LE: Tensor, factor: float) -> None:
    """Nudge each router's correction bias towards equal loads, without a loss (Wang et al., 2024, arXiv:2408.15664)."""
    layers = [
        layer for layer in [*model.layers, model.mtp_layer] if isinstance(layer, Layer) and layer.router is not None
    ]
    steps = BALANCE_STEP * factor * (loads_LE.mean(-1, keepdim=True) - loads_LE).sign()
    for layer, step in zip(layers, steps, strict=True):
        layer.router_bias += step
        layer.router_bias -= layer.router_bias.mean()


def _matrices(tensors: list[Tensor] | list[nn.Parameter] | list[Tensor | None]) -> Tensor:
    return torch.cat([t.reshape(-1, t.shape[-2], t.shape[-1]) for t in tensors if t is not None])
