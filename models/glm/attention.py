"""Multi-head latent attention over the paged cache, in absorbed form, with DSA selection.

    q_latent = rms(q_a x);  q = q_b q_latent;  c, k_rope = split(kv_a x);  c = rms(c)      cached: c, rope(k_rope)
    score    = ((key_up^T q_nope) . c + rope(q_rope) . k_rope) / sqrt(N + R)
    out      = o_proj( value_up (sum softmax(score) c) )

A rank of a tensor-parallel group holds some of the heads; the outputs are summed over the group. Under decode context
parallelism (DCP) a rank attends with the heads of its whole dcp group to the slots it owns, and the ranks exchange
partial results before `value_up`: the merge is linear, and latents of its own heads are all that a rank then needs.

T = rows, H = hidden, A = heads of this rank, G = heads of its dcp group, Q = query latent, L = kv latent, X = L + R,
N / R / V = nope, rope and value head dims.
Source: DeepSeek-V2, section 2.1; `GlmMoeDsaForCausalLM` in transformers for the layout of the projections.
"""

from collections.abc import Mapping

import torch

from specdec.dcp.communicator import ParallelGroups, ordered_sum, single_rank_groups
from specdec.dcp.exchange import ExchangeStrategy, exchange_states, gather_heads
from specdec.dcp.kv_store import KvStore
from specdec.dcp.metadata import BatchMetadata
from specdec.kernels.errors import GeometryError
from specdec.kernels.linear import head_linear, linear
from specdec.kernels.lse_merge import AttentionState
from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.rotary import Rotation, rotate
from specdec.kernels.row_padding import ROW_MULTIPLE
from specdec.kernels.sparse_mla import tiled_sparse_mla
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.indexer import Indexer
from specdec.models.glm.selection import Selection
from specdec.models.glm.trace import ForwardTrace

_GATHER_VALUES = 1 << 19  # values of cached rows gathered at once: 2 MiB stay in a CPU core's cache (1.4x over 64 MiB)
_ROWS_AT_ONCE = 256  # rows that ranks exchange at once: bounds the memory of a prefill pass


class LatentAttention:
    """The attention weights of one layer, and its indexer where it has one.

    Args:
        config: The checkpoint's config.
        parameters: Loaded parameters; the heads are this rank's.
        prefix: Of this layer's parameters.
        has_indexer: Whether the layer chooses positions itself.
        latent_norm_eps: Eps of the two latent norms.
        parallel: The groups of this rank; None is one rank.
        exchange: How partial attention is merged under DCP.
    """

    def __init__(
        self,
        config: GlmConfig,
        parameters: Mapping[str, torch.Tensor],
        prefix: str,
        *,
        has_indexer: bool,
        latent_norm_eps: float,
        parallel: ParallelGroups | None = None,
        exchange: ExchangeStrategy = ExchangeStrategy.PACKED,
    ) -> None:
        self.parallel = parallel or single_rank_groups()
        self.exchange = exchange
        self.q_lora_rank = config.q_lora_rank
        self.kv_lora_rank = config.kv_lora_rank
        self.nope_dim = config.qk_nope_head_dim
        self.scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        self.latent_norm_eps = latent_norm_eps
        self.qkv_a_proj = parameters[f"{prefix}.attention.qkv_a_proj"]
        self.q_a_layernorm = parameters[f"{prefix}.attention.q_a_layernorm"]
        self.kv_a_layernorm = parameters[f"{prefix}.attention.kv_a_layernorm"]
        self.q_b_proj = parameters[f"{prefix}.attention.q_b_proj"]
        kv_b_proj = parameters[f"{prefix}.attention.kv_b_proj"]
        self.num_heads = kv_b_proj.shape[0]
        self.key_up_ANL = kv_b_proj[:, : self.nope_dim]
        self.value_up_ALV = kv_b_proj[:, self.nope_dim :].transpose(1, 2)
        self.o_proj = parameters[f"{prefix}.attention.o_proj"]
        self.indexer = Indexer(config, parameters, f"{prefix}.indexer", dcp=self.parallel.dcp) if has_indexer else None

    def forward(
        self,
        x_TH: torch.Tensor,
        rotation: Rotation,
        selection: Selection | None,
        *,
        metadata: BatchMetadata,
        pool: KvStore,
        layer: int,
        trace: ForwardTrace | None = None,
    ) -> tuple[torch.Tensor, Selection]:
        """Write the rows' KV, choose slots, attend.

        Collectives of the dcp group where `metadata` is of more than one rank, and of the tp group where it has more
        than one.

        Args:
            x_TH: Normed input rows, T a multiple of the row block.
            rotation: Rotation of each row.
            selection: Slots to use as they are; None has this layer's own indexer choose. A layer without an indexer
                must be given one.
            metadata: Of the pool's geometry.
            pool: Holds this layer's latents and index keys.
            layer: The layer's number in the pool.
            trace: Takes in the margins of the choice.

        Returns:
            The attention output [T, H] (zeros before `o_proj` in padding rows), and the selection used.

        Raises:
            GeometryError: `metadata` is of another dcp group than this layer's.
        """
        self._check(metadata)
        q_latent_TQ, kv_latent_TL, k_rope_TR = linear(x_TH, self.qkv_a_proj).split_with_sizes(
            (self.q_lora_rank, self.kv_lora_rank, self.qkv_a_proj.shape[0] - self.q_lora_rank - self.kv_lora_rank),
            dim=-1,
        )
        q_latent_TQ = rms_norm(q_latent_TQ, self.q_a_layernorm, eps=self.latent_norm_eps)
        kv_latent_TL = rms_norm(kv_latent_TL, self.kv_a_layernorm, eps=self.latent_norm_eps)
        pool.write_latent(layer, kv_latent_TL, rotate(k_rope_TR, rotation), metadata)
        if selection is None:
            if self.indexer is None:
                raise AssertionError(f"layer {layer} shares a selection but none was carried to it")
            selection = self.indexer.select(
                x_TH, q_latent_TQ, rotation, metadata=metadata, pool=pool, layer=layer, trace=trace
            )
        q_TAX = linear(q_latent_TQ, self.q_b_proj).unflatten(-1, (self.num_heads, -1))
        q_absorbed_TAL = head_linear(q_TAX[..., : self.nope_dim], self.key_up_ANL)
        query_TAX = torch.cat((q_absorbed_TAL, rotate(q_TAX[..., self.nope_dim :], rotation)), dim=-1)
        latent_TAL = self._attend(query_TAX, selection, metadata=metadata, pool=pool, layer=layer)
        value_TAV = head_linear(latent_TAL.to(x_TH.dtype), self.value_up_ALV)
        return ordered_sum(linear(value_TAV.flatten(1), self.o_proj), self.parallel.tp), selection

    def _attend(
        self, query_TAX: torch.Tensor, selection: Selection, *, metadata: BatchMetadata, pool: KvStore, layer: int
    ) -> torch.Tensor:
        """Attend with this rank's heads to the chosen slots of all ranks, float32; padding rows give zeros."""
        dcp, num_live = self.parallel.dcp, metadata.num_tokens
        latent_TAL = query_TAX.new_zeros((*query_TAX.shape[:2], self.kv_lora_rank), dtype=torch.float32)
        for start in range(0, num_live, _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, num_live))
            if metadata.geometry.size == 1:
                latent_TAL[rows] = self._attend_owned(query_TAX[rows], selection, rows, pool=pool, layer=layer).out_TAL
            else:
                query_TGX = gather_heads(query_TAX[rows], dcp)
                state = self._attend_owned(query_TGX, selection, rows, pool=pool, layer=layer)
                with self.parallel.merge_clock.timing(query_TAX.device):
                    merged_TAL = exchange_states(state, dcp, self.exchange, first_owner_T=metadata.first_owner_T[rows])
                latent_TAL[rows] = merged_TAL
        return latent_TAL

    def _attend_owned(
        self, query_TGX: torch.Tensor, selection: Selection, rows: slice, *, pool: KvStore, layer: int
    ) -> AttentionState:
        """Attend to the chosen slots that this rank owns, a bounded number of gathered slots at a time."""
        row_TW, owned_TW = selection.row_TW[rows], selection.owned_TW[rows]
        step = max(ROW_MULTIPLE, _GATHER_VALUES // (row_TW.shape[1] * query_TGX.shape[-1]))
        states = [
            tiled_sparse_mla(
                query_TGX[start : start + step].float(),
                pool.gather_latent(layer, row_TW[start : start + step]),
                owned_TW[start : start + step],
                slots_per_tile=selection.slots_per_tile,
                scale=self.scale,
                latent_dim=self.kv_lora_rank,
            )
            for start in range(0, len(row_TW), step)
        ]
        return AttentionState(*(torch.cat(parts) for parts in zip(*states, strict=True)))

    def _check(self, metadata: BatchMetadata) -> None:
        """Refuse metadata of a group that is not the layer's: its ranks would wait for each other or merge nonsense."""
        geometry, dcp = metadata.geometry, self.parallel.dcp
        if geometry.size > 1 and (geometry.size, geometry.rank) != (dcp.size, dcp.rank):
            raise GeometryError(
                f"metadata of {geometry} was given to a layer of rank {dcp.rank} of {dcp.size} dcp ranks"
            )
