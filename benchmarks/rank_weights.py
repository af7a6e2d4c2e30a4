"""Random weights of a rank of GLM-5.2 at its real dimensions, of eight unless said, as they lie in a GPU's memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.kernels.block_fp8 import BLOCK_SIZE, dequantise_block_fp8
from specdec.kernels.block_fp8_linear import BlockFp8Linear, Workspace, concatenated_scales, concatenated_weights
from specdec.kernels.moe_experts import EXPERTS, HIDDEN, PackedExperts, pack_down, pack_gate_up
from specdec.kernels.rotary import inverse_frequency
from specdec.models.glm.layer_slice import (
    AttentionSlice,
    DenseSlice,
    IndexerSlice,
    LayerSlice,
    MixtureSlice,
    ModelSlice,
    MtpSlice,
    VocabularySlice,
)
from specdec.models.glm.rank_slices import without_indexer

Q_LATENT, LATENT, ROPE, NOPE, VALUE = 2048, 512, 64, 192, 256
HEADS = 8  # of a rank of eight
_ALL_HEADS, _DENSE_WIDTH, _WIDTH = 64, 12288, 2048  # of all ranks
INDEX_HEADS, INDEX_DIM = 32, 128
INDEX_TOPK, EPS, ROUTED_SCALING, ROPE_THETA = 2048, 1e-5, 2.5, 8e6
VOCABULARY = 19360  # of the rank
TP = 8
_E4M3_RMS = 104.0  # of random even e4m3 codes

Record = Callable[[str, torch.Tensor], None]  # takes in a parameter as `GlmTarget` names it, in float32


def random_e4m3(*shape: int) -> torch.Tensor:
    """Random bytes without NaN, float8_e4m3fn; their number is a multiple of 8."""
    values = torch.empty(shape, dtype=torch.uint8, device="cuda")
    words = values.view(-1).view(torch.int64)
    words.random_(-(1 << 63), None).bitwise_and_(-0x0101010101010102)  # an even code is no NaN
    return values.view(torch.float8_e4m3fn)


@dataclass(frozen=True, kw_only=True, slots=True)
class Depth:
    """What layers a model has, by number.

    Attributes:
        num_layers: All of them.
        num_dense: The first ones, which have no experts.
        full: Those with an indexer.
    """

    num_layers: int
    num_dense: int
    full: frozenset[int]


GLM_5_2 = Depth(num_layers=78, num_dense=3, full=frozenset({0, 1, 2, *range(6, 78, 4)}))


class RankWeights:
    """Makes the slices of layers, one after the other.

    Args:
        max_rows: Most rows of a pass.
        branch_gain: Factor on what layers add to the residual stream: with a small one the next token depends mostly
            on the last, and the MTP layer is often right.
        record: Takes in what `GlmTarget` would be given for the same weights; None keeps nothing of it.
        num_shares: Ranks that share each layer.
    """

    def __init__(
        self, *, max_rows: int, branch_gain: float = 1.0, record: Record | None = None, num_shares: int = TP
    ) -> None:
        self._heads = _ALL_HEADS // num_shares
        self._dense_width, self._width = _DENSE_WIDTH // num_shares, _WIDTH // num_shares
        self._max_rows = max_rows
        self._branch_gain = branch_gain
        self._workspace = Workspace(torch.device("cuda"))
        self._record = record

    def model(self, depth: Depth, *, vocabulary: int = VOCABULARY, with_mtp: bool, tp_size: int = TP) -> ModelSlice:
        """Make a whole model.

        Args:
            depth: Its layers.
            vocabulary: Ids of the rank.
            with_mtp: Whether it has an MTP layer.
            tp_size: Ranks that share `eh_proj`.
        """
        layers = [
            self.layer(f"layers.{number}", has_indexer=number in depth.full, is_sparse=number >= depth.num_dense)
            for number in range(depth.num_layers)
        ]
        return ModelSlice(
            layers=layers,
            final_norm=self._norm("norm", HIDDEN),
            vocabulary=VocabularySlice(
                first_id=0,
                embedding_VH=self.vector("embed_tokens", vocabulary, HIDDEN, dtype=torch.bfloat16),
                head_VH=self.vector("lm_head", vocabulary, HIDDEN, dtype=torch.bfloat16, spread=4 * HIDDEN**-0.5),
            ),
            mtp=self._mtp(tp_size) if with_mtp else None,
            inverse_frequency_F=inverse_frequency(theta=ROPE_THETA, dim=ROPE, device=torch.device("cuda")),
            index_topk=INDEX_TOPK,
            eps=EPS,
            routed_scaling=ROUTED_SCALING,
        )

    def _mtp(self, tp_size: int) -> MtpSlice:
        layer = self.layer("mtp.layer", has_indexer=True, is_sparse=True)
        eh_proj = torch.randn(HIDDEN, 2 * HIDDEN, device="cuda") * (self._branch_gain * HIDDEN**-0.5)
        eh_proj[:, :HIDDEN] += torch.eye(HIDDEN, device="cuda")
        eh_proj = eh_proj.bfloat16()
        self._keep("mtp.eh_proj", eh_proj.float())
        return MtpSlice(
            enorm=self._norm("mtp.enorm", HIDDEN),
            hnorm=self._norm("mtp.hnorm", HIDDEN),
            eh_proj=eh_proj[:, : 2 * HIDDEN // tp_size],
            first_column=0,
            layer=layer,
            recycled=without_indexer(layer, self._workspace),
            head_norm=self._norm("mtp.shared_head_norm", HIDDEN),
        )

    def layer(self, prefix: str, *, has_indexer: bool, is_sparse: bool) -> LayerSlice:
        """Make one decoder layer."""
        return LayerSlice(
            input_norm=self._norm(f"{prefix}.input_layernorm", HIDDEN),
            attention=self._attention(prefix, has_indexer=has_indexer),
            post_norm=self._norm(f"{prefix}.post_attention_layernorm", HIDDEN),
            mlp=self._mixture(f"{prefix}.moe") if is_sparse else self._dense(f"{prefix}.mlp"),
        )

    def vector(self, name: str, *shape: int, dtype: torch.dtype, spread: float = 1.0) -> torch.Tensor:
        """Make a parameter that is not quantised, normal with the given standard deviation."""
        values = (torch.randn(shape, device="cuda") * spread).to(dtype)
        self._keep(name, values.float())
        return values

    def _attention(self, prefix: str, *, has_indexer: bool) -> AttentionSlice:
        name = f"{prefix}.attention"
        projections = [self._matrix(Q_LATENT, HIDDEN), self._matrix(LATENT + ROPE, HIDDEN)]
        self._keep(f"{name}.qkv_a_proj", *projections)
        q_b = [self._matrix(self._heads * (NOPE + ROPE), Q_LATENT)]
        self._keep(f"{name}.q_b_proj", *q_b)
        indexer = None
        if has_indexer:
            index_name = f"{prefix}.indexer"
            projections.append(self._matrix(INDEX_DIM, HIDDEN))
            self._keep(f"{index_name}.wk", projections[-1])
            q_b.append(self._matrix(INDEX_HEADS * INDEX_DIM, Q_LATENT))
            self._keep(f"{index_name}.wq_b", q_b[-1])
            indexer = IndexerSlice(
                norm_weight=self._norm(f"{index_name}.k_norm_weight", INDEX_DIM).float(),
                norm_bias=self.vector(f"{index_name}.k_norm_bias", INDEX_DIM, dtype=torch.float32, spread=0.1),
                weights_proj=self.vector(
                    f"{index_name}.weights_proj", INDEX_HEADS, HIDDEN, dtype=torch.bfloat16, spread=HIDDEN**-0.5
                ),
            )
        kv_b = self.vector(
            f"{name}.kv_b_proj", self._heads, NOPE + VALUE, LATENT, dtype=torch.bfloat16, spread=LATENT**-0.5
        )
        o_proj = self._matrix(HIDDEN, self._heads * VALUE, gain=self._branch_gain)
        self._keep(f"{name}.o_proj", o_proj)
        return AttentionSlice(
            qkv_a=self._linear(*projections),
            q_a_norm=self._norm(f"{name}.q_a_layernorm", Q_LATENT),
            kv_a_norm=self._norm(f"{name}.kv_a_layernorm", LATENT),
            q_b=self._linear(*q_b),
            key_up_ANL=kv_b[:, :NOPE],
            value_up_ALV=kv_b[:, NOPE:].transpose(1, 2),
            o=self._linear(o_proj),
            indexer=indexer,
        )

    def _dense(self, name: str) -> DenseSlice:
        gate_up = self._matrix(2 * self._dense_width, HIDDEN)
        down = self._matrix(HIDDEN, self._dense_width, gain=self._branch_gain)
        self._keep(f"{name}.gate_up_proj", gate_up)
        self._keep(f"{name}.down_proj", down)
        return DenseSlice(gate_up=self._linear(gate_up), down=self._linear(down))

    def _mixture(self, name: str) -> MixtureSlice:
        router = self.vector(f"{name}.router", EXPERTS, HIDDEN, dtype=torch.bfloat16, spread=HIDDEN**-0.5)
        bias = self.vector(f"{name}.router_bias", EXPERTS, dtype=torch.float32, spread=0.01)
        gate_up, gate_up_scale = (make(EXPERTS + 1, 2 * self._width, HIDDEN) for make in (random_e4m3, _scales))
        down = random_e4m3(EXPERTS + 1, HIDDEN, self._width)
        down_scale = self._branch_gain * _scales(EXPERTS + 1, HIDDEN, self._width)
        if self._record is None:  # random in any order
            packed = PackedExperts(
                gate_up.view(torch.uint8).view(-1), gate_up_scale.view(-1, 1).expand(-1, 2).reshape(-1, 4),
                down.view(torch.uint8).view(-1), down_scale.view(-1, 1).expand(-1, 2).reshape(-1, 4),
            )  # fmt: skip
            return MixtureSlice(router=router, bias=bias, experts=packed)
        for key, values, scales in (("gate_up", gate_up, gate_up_scale), ("down", down, down_scale)):
            plain = torch.empty(values.shape, device="cuda")
            for expert in range(EXPERTS + 1):
                dequantise_block_fp8(values[expert], scales[expert], first_row=0, first_col=0, out_RC=plain[expert])
            self._record(f"{name}.expert_{key}_proj", plain[:EXPERTS])
            self._record(f"{name}.shared_{key}_proj", plain[EXPERTS])
        experts = PackedExperts(*pack_gate_up(gate_up, gate_up_scale), *pack_down(down, down_scale))
        return MixtureSlice(router=router, bias=bias, experts=experts)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        values = (1 + 0.1 * torch.randn(size, device="cuda")).bfloat16()
        self._keep(name, values.float())
        return values

    def _matrix(self, num_rows: int, num_cols: int, *, gain: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        return random_e4m3(num_rows, num_cols), gain * _scales(num_rows, num_cols)

    def _linear(self, *matrices: tuple[torch.Tensor, torch.Tensor]) -> BlockFp8Linear:
        """One weight of several matrices, one below the other."""
        values, scales = zip(*matrices, strict=True)
        weight_OI = concatenated_weights(values)
        scale_JB = concatenated_scales(scales, [len(value) for value in values])
        return BlockFp8Linear(weight_OI, scale_JB, max_rows=self._max_rows, workspace=self._workspace)

    def _keep(self, name: str, *parts: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
        if self._record is None:
            return
        plain = []
        for part in parts:
            if isinstance(part, tuple):
                values, scales = part
                part = torch.empty(values.shape, device="cuda")  # noqa: PLW2901
                dequantise_block_fp8(values, scales, first_row=0, first_col=0, out_RC=part)
            plain.append(part)
        self._record(name, torch.cat(plain))


def _scales(*shape: int) -> torch.Tensor:
    """Scales with which a product of random e4m3 values and a normed row has variance one."""
    *leading, num_rows, num_cols = shape
    blocks = (*leading, -(-num_rows // BLOCK_SIZE), -(-num_cols // BLOCK_SIZE))
    return (0.5 + torch.rand(blocks, device="cuda")) / (_E4M3_RMS * num_cols**0.5)
