"""Root-mean-square norm, and the layer norm of the index keys.

    rms_norm(x)   = x / sqrt(mean(x^2) + eps) * weight
    layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

T = rows, H = features. Both compute in float32.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization"; Ba et al., "Layer Normalization".
"""

import torch
import torch.nn.functional as F


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Normalise each row by its root mean square, in float32, round to the input dtype, then scale.

    Args:
        x_TH: Rows, any float dtype.
        weight_H: Scale, the dtype of `x_TH`.
        eps: Added to the mean square.

    Returns:
        Rows of the dtype of `x_TH`.
    """
    return F.rms_norm(x_TH.float(), x_TH.shape[-1:], None, eps).to(x_TH.dtype) * weight_H


def layer_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Normalise each row to mean 0 and variance 1, then scale and shift: float32 in, float32 weights, float32 out."""
    return F.layer_norm(x_TH.float(), x_TH.shape[-1:], weight_H, bias_H, eps)
