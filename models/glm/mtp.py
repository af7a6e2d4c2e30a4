"""The multi-token-prediction layer: the checkpoint's own draft model.

    z_t = eh_proj( concat( enorm(embed(x[t+1])), hnorm(h_t) ) )
    g_t = shared_head_norm( decoder_layer(z)_t );   draft of x[t+2] = head(g_t)

h_t is the target's hidden state after its final norm in the refresh pass, and g_{t-1} in the steps that recycle.
T = rows, H = hidden.
Source: DeepSeek-V3, section 2.2; GLM-5 reference configs (`num_nextn_predict_layers`, `index_share_for_mtp_iteration`).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import torch

from specdec.dcp.kv_store import KvStore
from specdec.dcp.metadata import BatchMetadata
from specdec.kernels.linear import linear
from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.rotary import rotation_at
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.decoder_layer import DecoderLayer
from specdec.models.glm.selection import Selection
from specdec.models.glm.target import GlmTarget

MTP_LAYER = 0  # the draft pool holds one layer


class MtpIndexSharing(StrEnum):
    """What the recycled draft steps attend to.

    OFF: every step runs the layer's own indexer.
    ANCHOR: every step reuses the choice of the row that gave the first draft; it holds positions up to that row only.
    ANCHOR_AND_DRAFTS: as ANCHOR, plus the rows that the draft steps themselves wrote, their own included.
    """

    OFF = "off"
    ANCHOR = "anchor"
    ANCHOR_AND_DRAFTS = "anchor-and-drafts"


class MtpOutput(NamedTuple):
    """One pass of the MTP layer.

    Attributes:
        g_TH: Hidden states after `shared_head_norm`: feed them to the head, and to the next recycled step.
        selection: Slots the rows attended to (live rows only).
    """

    g_TH: torch.Tensor
    selection: Selection


class MtpLayer:
    """The MTP layer of a checkpoint; embedding, head and rotation are the target's."""

    def __init__(
        self,
        config: GlmConfig,
        parameters: Mapping[str, torch.Tensor],
        target: GlmTarget,
        *,
        latent_norm_eps: float | None,
    ) -> None:
        self.target = target
        self.eps = config.rms_norm_eps
        self.enorm = parameters["mtp.enorm"]
        self.hnorm = parameters["mtp.hnorm"]
        self.eh_proj = parameters["mtp.eh_proj"]
        self.shared_head_norm = parameters["mtp.shared_head_norm"]
        self.layer = DecoderLayer(
            config,
            parameters,
            "mtp.layer",
            has_indexer=True,
            is_sparse=True,
            latent_norm_eps=config.rms_norm_eps if latent_norm_eps is None else latent_norm_eps,
            parallel=target.parallel,
            exchange=target.exchange,
        )

    def forward(
        self,
        next_token_id_T: torch.Tensor,
        hidden_TH: torch.Tensor,
        *,
        metadata: BatchMetadata,
        pool: KvStore,
        selection: Selection | None = None,
    ) -> MtpOutput:
        """Run the layer on T rows, writing their draft KV.

        Args:
            next_token_id_T: x[t+1] of each row t, i64 [T].
            hidden_TH: The target's hidden state of row t after the final norm, or g of the row before.
            metadata: Positions (t, the hidden's own) and pages, of the draft pool's geometry.
            pool: The draft pool.
            selection: Slots to attend to; None runs the layer's indexer, which also writes the rows' index keys.
        """
        rotation = rotation_at(metadata.position_T, self.target.inverse_frequency)
        embedded_TH = rms_norm(self.target.embed(next_token_id_T), self.enorm, eps=self.eps)
        z_TX = torch.cat((embedded_TH, rms_norm(hidden_TH, self.hnorm, eps=self.eps)), dim=-1)
        u_TH, selection = self.layer.forward(
            linear(z_TX, self.eh_proj), rotation, selection, metadata=metadata, pool=pool, layer=MTP_LAYER
        )
        return MtpOutput(rms_norm(u_TH, self.shared_head_norm, eps=self.eps), selection)
