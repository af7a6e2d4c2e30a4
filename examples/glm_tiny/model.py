"""glm-tiny for training: the trunk over whole sequences and the MTP layer on recycled steps.

Letters as in layers.py; T = probe rows, a sorted subset of positions on which the costly parts are computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import (
    Layer,
    Projected,
    attend,
    finish,
    index_parts,
    index_scores,
    project,
    rms_norm,
    rope_table,
)  # fmt: skip
from .model_config import TinyConfig

SELECTION_ROWS = 256  # query rows whose index scores exist at a time: heads x rows x S floats a sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class TrunkOutput:
    """Result of one pass of the trunk.

    Attributes:
        hidden_BSH: After the final norm, float32: feeds the head and the MTP layer.
        projected: Per layer, what attention and indexer used.
        loads_LE: Share of tokens per expert, one row a layer.
    """

    hidden_BSH: Tensor
    projected: tuple[Projected, ...]
    loads_LE: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpOutput:
    """Result of the MTP layer.

    Attributes:
        first_BSH: g of step 1 for every row (after shared_head.norm).
        recycled: g of steps 2, 3, ... on the probe rows, each [B, T, H].
        projected: Step 1's projections.
        load_E: Share of tokens per expert in step 1.
        recycled_probs: Per recycled step, the largest attention of any head on the step-1 keys, [B, T, S], detached.
    """

    first_BSH: Tensor
    recycled: tuple[Tensor, ...]
    projected: Projected
    load_E: Tensor
    recycled_probs: tuple[Tensor, ...]


class TinyModel(nn.Module):
    """Embedding, trunk, head and MTP layer; `compile_stages` makes the stages of a layer fused GPU code."""

    def __init__(self, config: TinyConfig, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        size = config.hidden_size
        self.embed = nn.Parameter(torch.randn(config.vocab_size, size) * 0.3)
        self.layers = nn.ModuleList(
            Layer(config, is_dense=i == 0, has_indexer=kind == "full") for i, kind in enumerate(config.indexer_types)
        )
        self.norm = nn.Parameter(torch.ones(size))
        self.head = nn.Parameter(torch.zeros(config.vocab_size, size))
        self.mtp_layer = Layer(config, is_dense=False, has_indexer=True)
        self.mtp_embed_norm = nn.Parameter(torch.ones(size))
        self.mtp_hidden_norm = nn.Parameter(torch.ones(size))
        self.mtp_eh = nn.Parameter(torch.randn(size, 2 * size) * (2 * size) ** -0.5)
        self.mtp_head_norm = nn.Parameter(torch.ones(size))
        self._project: Callable[..., Any] = project
        self._finish: Callable[..., Any] = finish
        self._scores: Callable[..., Any] = index_scores

    def compile_stages(self) -> None:
        """Compile projection, MLP and index scores once for all layers; attention is a fused kernel already."""
        self._project = torch.compile(project, dynamic=False)
        self._finish = torch.compile(finish, dynamic=False)
        self._scores = torch.compile(index_scores, dynamic=False)

    def layer(self, index: int) -> Layer:
        """Give one decoder layer of the trunk."""
        layer = self.layers[index]
        assert isinstance(layer, Layer)
        return layer

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head; float32."""
        return F.linear(hidden.to(self.compute_dtype), self.head.to(self.compute_dtype)).float()

    def trunk(self, ids_BS: Tensor, *, sparse: bool) -> TrunkOutput:
        """Run all layers; with `sparse` every row attends only to its index_topk positions."""
        c, dtype = self.config, self.compute_dtype
        cos, sin = rope_table(torch.arange(ids_BS.shape[1], device=ids_BS.device), c)
        x = F.embedding(ids_BS, self.embed)
        mask: Tensor | None = None
        projected, loads = [], []
        for layer in map(self.layer, range(c.num_layers)):
            p = self._project(x, layer, cos, sin, c, dtype)
            if sparse and layer.indexer is not None:
                mask = self._selection_mask(p, layer, cos, sin)
            x, load = self._finish(x, attend(p, mask), layer, c, dtype)
            projected.append(p)
            loads.append(load)
        hidden = rms_norm(x, self.norm, c.rms_norm_eps)
        return TrunkOutput(hidden_BSH=hidden, projected=tuple(projected), loads_LE=torch.stack(loads))

    def mtp(self, ids_Bs: Tensor, hidden_BSH: Tensor, rows_T: Tensor, *, num_steps: int, sparse: bool) -> MtpOutput:
        """Draft `num_steps` tokens: step 1 on all rows, the recycled ones on `rows_T`.

        Step j of row t reads token t + j and the previous step's g, at rotary position t + j - 1. It attends to the
        step-1 keys of rows <= t (those that row t selected) and to the keys of its own earlier steps and itself: what
        a cache holds while drafting.

        Args:
            ids_Bs: i64 [B, S + num_steps or more]: the tokens of the S rows and at least num_steps after them.
            hidden_BSH: The trunk's normed hidden states.
            rows_T: i64 [T], sorted.
            num_steps: Steps in all, >= 1.
            sparse: Select index_topk keys with the layer's own indexer.
        """
        c, dtype, layer, length = self.config, self.compute_dtype, self.mtp_layer, hidden_BSH.shape[1]
        cos, sin = rope_table(torch.arange(length, device=ids_Bs.device), c)
        x = self._mtp_input(ids_Bs[:, 1 : length + 1], hidden_BSH)
        p = self._project(x, layer, cos, sin, c, dtype)
        mask = self._selection_mask(p, layer, cos, sin) if sparse else None
        x, load = self._finish(x, attend(p, mask), layer, c, dtype)
        first = g = rms_norm(x, self.mtp_head_norm, c.rms_norm_eps)
        allowed = (
            rows_T[:, None] >= torch.arange(length, device=rows_T.device) if mask is None else mask[:, 0, rows_T] == 0
        )
        g, recycled, own, probs = g[:, rows_T], [], [], []
        for step in range(2, num_steps + 1):
            x = self._mtp_input(ids_Bs[:, rows_T + step], g)
            row_cos, row_sin = rope_table(rows_T + step - 1, c)
            r = project(x, layer, row_cos, row_sin, c, dtype)
            own.append((r.k_BASd, r.v_BASV))
            heads, prob = _attend_recycled(r.q_BASd, p, own, allowed)
            x, _ = finish(x, heads, layer, c, dtype)
            g = rms_norm(x, self.mtp_head_norm, c.rms_norm_eps)
            recycled.append(g)
            probs.append(prob)
        return MtpOutput(
            first_BSH=first, recycled=tuple(recycled), projected=p, load_E=load, recycled_probs=tuple(probs)
        )

    def row_scores(self, p: Projected, layer: Layer, rows_T: Tensor) -> Tensor:
        """Index scores of the probe rows, [B, T, S], with gradients to the indexer only."""
        assert layer.indexer is not None
        length = p.x_BSH.shape[1]
        cos, sin = rope_table(torch.arange(length, device=rows_T.device), self.config)
        q, k, weights = index_parts(p, layer.indexer, cos, sin, self.config)
        scores: Tensor = self._scores(q[:, :, rows_T], k, weights[:, rows_T])
        return scores

    @torch.no_grad()
    def _selection_mask(self, p: Projected, layer: Layer, cos: Tensor, sin: Tensor) -> Tensor:
        """Additive mask [B, 1, S, S]: 0 at the index_topk best visible positions of each row, -inf elsewhere."""
        assert layer.indexer is not None
        q, k, weights = index_parts(p, layer.indexer, cos, sin, self.config)
        length, kept = k.shape[1], min(self.config.index_topk, k.shape[1])
        columns = torch.arange(length, device=k.device)
        masks = []
        for start in range(0, length, SELECTION_ROWS):
            rows = slice(start, start + SELECTION_ROWS)
            scores = self._scores(q[:, :, rows], k, weights[:, rows])
            scores = scores.masked_fill(columns > columns[rows, None], -torch.inf)
            floor = scores.topk(kept, dim=-1).values[..., -1:]
            masks.append(torch.where((scores >= floor) & (scores > -torch.inf), 0.0, -torch.inf).to(self.compute_dtype))
        return torch.cat(masks, dim=1)[:, None]

    def _mtp_input(self, next_ids: Tensor, hidden: Tensor) -> Tensor:
        eps, dtype = self.config.rms_norm_eps, self.compute_dtype
        embedded = rms_norm(F.embedding(next_ids, self.embed), self.mtp_embed_norm, eps)
        both = torch.cat([embedded, rms_norm(hidden, self.mtp_hidden_norm, eps)], dim=-1)
        return F.linear(both.to(dtype), self.mtp_eh.to(dtype)).float()


def attention_probs(p: Projected, rows_T: Tensor) -> Tensor:
    """Largest causal attention that any head of the probe rows pays to each key, float32 [B, T, S], no gradients."""
    with torch.no_grad():
        scores = (p.q_BASd[:, :, rows_T] @ p.k_BASd.transpose(-1, -2)).float() * p.q_BASd.shape[-1] ** -0.5
        hidden = torch.arange(scores.shape[-1], device=rows_T.device) > rows_T[:, None]
        largest: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1).amax(1)
        return largest


def _attend_recycled(
    q_BATd: Tensor, first: Projected, own: list[tuple[Tensor, Tensor]], allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend to step-1 keys where `allowed` ([T, S] or [B, T, S]) and to the row's own keys of later steps."""
    allowed = allowed if allowed.dim() == 2 else allowed[:, None]
    scale = q_BATd.shape[-1] ** -0.5
    shared = (q_BATd @ first.k_BASd.transpose(-1, -2)).float().masked_fill(~allowed, -torch.inf)
    mine = torch.stack([(q_BATd * k).sum(-1) for k, _ in own], dim=-1).float()
    probs = (torch.cat([shared, mine], dim=-1) * scale).softmax(-1).to(q_BATd.dtype)
    length = shared.shape[-1]
    heads = probs[..., :length] @ first.v_BASV
    for place, (_, v) in enumerate(own):
        heads = heads + probs[..., length + place, None] * v
    return heads, probs[..., :length].detach().float().amax(1)
