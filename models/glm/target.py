"""The target model: embedding, decoder layers with IndexShare, final norm, head.

Under tensor parallelism a rank holds its heads, its share of the MLPs and experts, and its rows of the vocabulary.
What it lacks is summed or gathered in rank order, so every rank computes the same hidden states and logits.

T = rows, H = hidden, V = vocabulary, N = tensor-parallel ranks.
Source: `GlmMoeDsaForCausalLM` in transformers.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from specdec.dcp.communicator import Communicator, ParallelGroups, ordered_sum, single_rank_groups
from specdec.dcp.exchange import ExchangeStrategy
from specdec.dcp.kv_store import KvStore
from specdec.dcp.metadata import BatchMetadata
from specdec.kernels.linear import linear
from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.rotary import inverse_frequency, rotation_at
from specdec.kernels.row_padding import pad_rows
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.decoder_layer import DecoderLayer
from specdec.models.glm.selection import Selection
from specdec.models.glm.trace import ForwardTrace


class GlmTarget:
    """GLM-5.x without its MTP layer.

    Args:
        config: The checkpoint's config.
        parameters: Loaded parameters; nothing is copied.
        latent_norm_eps: Eps of the two latent norms. None takes `rms_norm_eps`, as production engines do; the
            transformers implementation uses 1e-6 there.
        parallel: The groups of this rank; None is one rank, which holds every parameter whole.
        exchange: How dcp ranks exchange partial attention.
    """

    def __init__(
        self,
        config: GlmConfig,
        parameters: Mapping[str, torch.Tensor],
        *,
        latent_norm_eps: float | None = None,
        parallel: ParallelGroups | None = None,
        exchange: ExchangeStrategy = ExchangeStrategy.PACKED,
    ) -> None:
        self.config = config
        self.parallel = parallel or single_rank_groups()
        self.exchange = exchange
        self.embed_tokens = parameters["embed_tokens"]
        self.norm = parameters["norm"]
        self.lm_head = parameters["lm_head"]
        self.layers = [
            DecoderLayer(
                config,
                parameters,
                f"layers.{layer}",
                has_indexer=config.indexer_types[layer] == "full",
                is_sparse=config.mlp_layer_types[layer] == "sparse",
                latent_norm_eps=config.rms_norm_eps if latent_norm_eps is None else latent_norm_eps,
                parallel=self.parallel,
                exchange=exchange,
            )
            for layer in range(config.num_layers)
        ]
        self.inverse_frequency = inverse_frequency(
            theta=config.rope_theta, dim=config.qk_rope_head_dim, device=self.embed_tokens.device
        )

    def forward(
        self,
        token_id_T: torch.Tensor,
        *,
        metadata: BatchMetadata,
        pool: KvStore,
        trace: ForwardTrace | None = None,
        when_stored: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Run one pass over T rows, writing their KV to the pool.

        Args:
            token_id_T: Token of each row, i64 [T]; padding rows hold any valid id.
            metadata: Positions and pages of the rows, of the pool's geometry.
            pool: The target pool.
            trace: Filled with the pass's choices where given.
            when_stored: Called with each layer, in order, once this rank has stored there all that it is to store; on a
                GPU, once that was launched on the current stream. None where nobody asks.

        Returns:
            Hidden states after the final norm, [T, H]; this is also what the MTP layer is fed.
        """
        rotation = rotation_at(metadata.position_T, self.inverse_frequency)
        x_TH = self.embed(token_id_T)
        selection: Selection | None = None
        for number, layer in enumerate(self.layers):
            if layer.attention.indexer is not None:
                selection = None
            x_TH, selection = layer.forward(
                x_TH, rotation, selection, metadata=metadata, pool=pool, layer=number, trace=trace
            )
            if when_stored is not None:
                when_stored(number)
        return rms_norm(x_TH, self.norm, eps=self.config.rms_norm_eps)

    def embed(self, token_id_T: torch.Tensor) -> torch.Tensor:
        """Look tokens up: [T, H]; exactly the row of the one rank that holds it."""
        return vocabulary_parallel_embedding(token_id_T, self.embed_tokens, self.parallel.tp)

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Apply the head to any number of rows after the final norm: float32 [T, V], whole on every rank."""
        shard_TV = linear(pad_rows(hidden_TH), self.lm_head)[: hidden_TH.shape[0]].float()
        tp = self.parallel.tp
        return shard_TV if tp.size == 1 else tp.all_gather(shard_TV).transpose(0, 1).flatten(1)


def vocabulary_parallel_embedding(token_id_T: torch.Tensor, shard_VH: torch.Tensor, tp: Communicator) -> torch.Tensor:
    """Look tokens up in an embedding of which each rank holds consecutive rows: [T, H]."""
    if tp.size == 1:
        return F.embedding(token_id_T, shard_VH)
    local_id_T = token_id_T - tp.rank * len(shard_VH)
    is_here_T = (local_id_T >= 0) & (local_id_T < len(shard_VH))
    row_TH = F.embedding(local_id_T.where(is_here_T, 0), shard_VH)
    return ordered_sum(row_TH.masked_fill(~is_here_T[:, None], 0), tp)
