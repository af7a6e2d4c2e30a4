"""Run the model directly over one request, without an engine."""

from collections.abc import Sequence

import numpy as np
import torch

from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.layout import KvFormat, PoolLayout
from specdec.dcp.metadata import BatchMetadata, build_metadata
from specdec.dcp.pool import KvPool
from specdec.kernels.row_padding import pad_rows
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.target import GlmTarget
from specdec.models.glm.trace import ForwardTrace


class OneRequest:
    """The pools of one request whose pages lie in a scrambled order; unused memory is NaN."""

    def __init__(
        self,
        config: GlmConfig,
        *,
        num_tokens: int,
        page_size: int = 4,
        kv_format: KvFormat = KvFormat.FLOAT32,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.num_pages = -(-num_tokens // page_size) + 3
        self.page_size = page_size
        page_ids = np.random.default_rng(0).permutation(self.num_pages).astype(np.int64)
        self.page_table = page_ids[None, : -(-num_tokens // page_size)]
        self.target_pool = self._pool(
            PoolRole.TARGET, config, config.num_layers, config.full_layers, kv_format=kv_format
        )
        self.draft_pool = self._pool(PoolRole.DRAFT, config, 1, (0,), kv_format=kv_format)

    def metadata(self, pool: KvPool, positions: Sequence[int]) -> BatchMetadata:
        """Metadata of the request's rows at `positions`."""
        return build_metadata(
            geometry=pool.geometry,
            page_size=self.page_size,
            num_pages=self.num_pages,
            request_index=np.zeros(len(positions), dtype=np.int64),
            position=np.asarray(positions, dtype=np.int64),
            page_table=self.page_table,
            device=self.device,
        )

    def _pool(
        self, role: PoolRole, config: GlmConfig, num_layers: int, index_layers: tuple[int, ...], *, kv_format: KvFormat
    ) -> KvPool:
        layout = PoolLayout(
            role=role,
            page_size=self.page_size,
            kv_format=kv_format,
            kv_lora_rank=config.kv_lora_rank,
            rope_head_dim=config.qk_rope_head_dim,
            index_head_dim=config.index_head_dim,
            num_latent_layers=num_layers,
            index_layers=index_layers,
            fp8_scales=(1.0,) * num_layers if kv_format is KvFormat.FP8 else (),
        )
        pool = KvPool(layout, num_pages=self.num_pages, geometry=Geometry(1, 0, role), device=self.device)
        for entry in layout.entries:
            pool.buffer(entry.kind).fill_(0xFF)  # NaN in float32, bfloat16 and e4m3 alike
        return pool


def run_target(
    target: GlmTarget, request: OneRequest, token_ids: torch.Tensor, *, chunks: Sequence[int]
) -> tuple[torch.Tensor, list[ForwardTrace]]:
    """Run the target over a prompt cut into `chunks`; returns the normed hidden states and one trace a chunk."""
    hidden, traces, begin = [], [], 0
    for size in chunks:
        trace = ForwardTrace()
        metadata = request.metadata(request.target_pool, range(begin, begin + size))
        hidden_TH = target.forward(
            pad_rows(token_ids[begin : begin + size]), metadata=metadata, pool=request.target_pool, trace=trace
        )
        hidden.append(hidden_TH[:size])
        traces.append(trace)
        begin += size
    return torch.cat(hidden), traces
