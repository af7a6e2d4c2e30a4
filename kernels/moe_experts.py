"""A mixture layer on a Hopper GPU: routing, the chosen experts and the shared one, in two or three launches.

    routing = route(x, router, bias)                                           best expert first
    out     = sum_C weight_TC * mlp_{expert_TC}(x)  +  mlp_shared(x)           in that order

Weights stay block-FP8 in memory and are widened on the way into the matrix units; each active expert's are read once
for every 8, 16 or 32 of its tokens. A token's bits do not depend on the tokens beside it: rows are tiled by the
number of tokens, but every tiling sums in the same order.

T = tokens, E = experts without the shared one, C = chosen, H = hidden, M = width, X = 2M; K = inputs of a matrix.
Source: `moe_router.cu` and `moe_experts.cu` beside this file; the formula is that of `expert_routing.py` and
`gated_mlp.py`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.kernels.block_fp8 import BLOCK_SIZE, dequantise_block_fp8
from specdec.kernels.cuda_program import Macros, cuda_kernel
from specdec.kernels.expert_routing import Routing, route
from specdec.kernels.tensor_check import check_tensor

HIDDEN, WIDTH, EXPERTS, CHOSEN = 6144, 256, 256, 8  # GLM-5.2; the width is an eighth of each expert's
WIDTHS = (256, 512, 1024, 2048)  # of a rank among 8, 4, 2 and 1
MAX_TOKENS = 768
_COUNTERS = 512  # more than 2 and the most jobs, rounded up to 32
_SLICES = 16  # of the router's sum
_FEW = 8  # tokens, whose experts are chosen where they are used
_ALIGNMENT = 16  # bytes that the kernels move at once
_BYTE_ORDER = [2, 0, 3, 1]  # of four neighbours: the first two in the odd bytes, from where they take one shift fewer


class PackedExperts(NamedTuple):
    """Weights of one layer's experts, the shared one last, as the kernel reads them.

    Attributes:
        gate_up: u8 [(E + 1) * X * H], packed.
        gate_up_scale: float32 [(E + 1) * X * H / 32768, 4], a piece's.
        down: u8 [(E + 1) * H * M], packed.
        down_scale: float32, likewise.
    """

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor


class Shape(NamedTuple):
    """How the kernel tiles; no number in it changes a result."""

    groups: int  # of 16 rows in a stage
    groups_each: int  # of those, a warp's
    column_tiles: int  # of 8 pairs of an expert that share one reading of its weights
    stages: int  # of a ring; what shared memory holds, for few tokens beside a block of `few_scores`
    crews: int  # of a block, each with a ring
    max_tokens: int


SHAPES = (  # the first that takes the tokens
    Shape(groups=2, groups_each=1, column_tiles=1, stages=12, crews=2, max_tokens=1),
    Shape(groups=4, groups_each=1, column_tiles=1, stages=6, crews=2, max_tokens=2),
    Shape(groups=8, groups_each=2, column_tiles=1, stages=6, crews=1, max_tokens=_FEW),
    Shape(groups=8, groups_each=2, column_tiles=4, stages=4, crews=1, max_tokens=MAX_TOKENS),
)


def moe_ref(
    x_TH: torch.Tensor,
    router_EH: torch.Tensor,
    bias_E: torch.Tensor,
    experts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    num_chosen: int,
    scaling: float,
) -> tuple[torch.Tensor, Routing]:
    """Define the layer in float64, with the choice made in float32: out [T, H] and the routing.

    Args:
        x_TH: Tokens.
        router_EH: Router weight.
        bias_E: Choice bias, float32.
        experts: For each expert, the shared one last: gate and up [X, H] e4m3, their scales, down [H, M], its scales.
        num_chosen: C.
        scaling: Factor on the routed experts' weights.
    """
    padding = (0, 0, 0, -len(x_TH) % 8)
    routing = route(
        F.pad(x_TH, padding).float(), router_EH.float(), bias_E, num_chosen=num_chosen, num_groups=1,
        num_chosen_groups=1, normalise=True, scaling=scaling,
    )  # fmt: skip
    routing = Routing(routing.expert_TC[: len(x_TH)], routing.weight_TC[: len(x_TH)])
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float64, device=x_TH.device)
    for expert, (gate_up_XH, gate_up_scale, down_HM, down_scale) in enumerate(experts):
        is_shared = expert == len(experts) - 1
        weight_TC = routing.weight_TC * (routing.expert_TC == expert)
        weight_T = torch.ones_like(out_TH[:, 0]) if is_shared else weight_TC.sum(dim=1).double()
        token_P = weight_T.nonzero()[:, 0]
        if len(token_P):
            gate, up = F.linear(x_TH[token_P].double(), _values(gate_up_XH, gate_up_scale)).chunk(2, dim=-1)
            part_PH = F.linear(F.silu(gate) * up, _values(down_HM, down_scale))
            out_TH[token_P] += weight_T[token_P, None] * part_PH
    return out_TH, routing


def _values(q_RC: torch.Tensor, scale_inv_IJ: torch.Tensor) -> torch.Tensor:
    value_RC = torch.empty(q_RC.shape, dtype=torch.float64, device=q_RC.device)
    dequantise_block_fp8(q_RC, scale_inv_IJ, first_row=0, first_col=0, out_RC=value_RC)
    return value_RC


def pack_gate_up(gate_up_EXH: torch.Tensor, scale_EIJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack gate and up: a group of 16 rows is 8 of gate and the same 8 of up, so that both meet in one thread.

    Args:
        gate_up_EXH: float8_e4m3fn [E, 2M, H], gate first.
        scale_EIJ: float32 [E, 2M / 128, H / 128].
    """
    num_pieces = gate_up_EXH.shape[1] // 128
    rows_ERPGNK = gate_up_EXH.unflatten(1, (2, num_pieces, 8, 8))
    block_of_P = torch.arange(num_pieces, device=scale_EIJ.device) * 64 // BLOCK_SIZE
    scale_ERPJ = scale_EIJ.unflatten(1, (2, -1))[:, :, block_of_P]
    return pack_rows_for_tensor_cores(rows_ERPGNK.permute(0, 2, 3, 1, 4, 5)), _pack_scales(scale_ERPJ)


def pack_down(down_EHM: torch.Tensor, scale_EIJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack down: neighbours of a group's rows, even and odd, meet in one thread, which writes both in one word.

    Args:
        down_EHM: float8_e4m3fn [E, H, M].
        scale_EIJ: float32 [E, H / 128, M / 128].
    """
    rows_EPGNRK = down_EHM.unflatten(1, (-1, 8, 8, 2))
    return pack_rows_for_tensor_cores(rows_EPGNRK.permute(0, 1, 2, 4, 3, 5)), _pack_scales(
        scale_EIJ[:, None].expand(-1, 2, -1, -1)
    )


def pack_rows_for_tensor_cores(rows_EPGRNK: torch.Tensor) -> torch.Tensor:
    """Order weights so that a stage of the kernel is one run of bytes, and a lane's operands are 16 of them.

    A piece is 128 rows by 256 inputs, 32 KB; a tile of rows is its pieces along K, one after the other. In a piece
    come, from the outside in: 8 groups of 16 rows, 2 blocks of 128 inputs, 2 halves of 64, rows 0-7 then rows 8-15 of
    the group, 8 rows by 4 quarters of 16 inputs (a lane each), 4 times 4 neighbours in `_BYTE_ORDER`.

    Args:
        rows_EPGRNK: One-byte values [E, pieces of rows, 8 groups, 2, 8 rows, K].

    Returns:
        u8, flat.
    """
    split: torch.Tensor = rows_EPGRNK.view(torch.uint8).unflatten(-1, (-1, 2, 2, 4, 4, 4))[..., _BYTE_ORDER]
    #      E P step G block half R N quarter 4 byte
    return split.permute(0, 1, 5, 2, 6, 7, 3, 4, 8, 9, 10).contiguous().view(-1)


def _pack_scales(scale_ERPJ: torch.Tensor) -> torch.Tensor:
    """Order scales as the pieces: those of rows 0-7 of the groups for both blocks of 128 inputs, then of rows 8-15."""
    scale_EPSRB: torch.Tensor = scale_ERPJ.unflatten(-1, (-1, 2)).permute(0, 2, 3, 1, 4)
    return scale_EPSRB.contiguous().view(-1, 4)


class MixtureLayer:
    """Runs mixture layers of GLM-5.2's size, a rank's slice; its scratch memory serves any layer in turn.

    The blocks of the last kernel wait for each other, each on a multiprocessor of its own: another stream may delay
    them, but must not wait for them while it holds a multiprocessor.

    Args:
        device: Of everything.
        max_tokens: Most tokens of a call, at most `MAX_TOKENS`.
        width: M, one of `WIDTHS`.
    """

    def __init__(self, device: torch.device, *, max_tokens: int = MAX_TOKENS, width: int = WIDTH) -> None:
        if not 1 <= max_tokens <= MAX_TOKENS or width not in WIDTHS:
            raise ValueError(
                f"a call takes 1 to {MAX_TOKENS} tokens and width is one of {WIDTHS}, got {max_tokens} and {width}"
            )
        self._width = width
        num_pairs = max_tokens * (CHOSEN + 1)
        self._max_tokens = max_tokens
        self._num_blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self._partial = torch.empty(_SLICES * max_tokens * EXPERTS, dtype=torch.float32, device=device)
        self._hidden = torch.empty((num_pairs, width), dtype=torch.bfloat16, device=device)
        self._parts = torch.empty((num_pairs, HIDDEN), dtype=torch.bfloat16, device=device)
        self._counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        self.expert_TC = torch.empty((max_tokens, CHOSEN), dtype=torch.int32, device=device)
        self.weight_TC = torch.empty((max_tokens, CHOSEN), dtype=torch.float32, device=device)

    def __call__(
        self,
        x_TH: torch.Tensor,
        router_EH: torch.Tensor,
        bias_E: torch.Tensor,
        experts: PackedExperts,
        out_TH: torch.Tensor,
        *,
        scaling: float,
    ) -> None:
        """Write the layer's output for T tokens; afterwards `expert_TC[:T]` and `weight_TC[:T]` hold the routing.

        Args:
            x_TH: Tokens, bfloat16 [T, 6144], contiguous.
            router_EH: Router weight, bfloat16 [256, 6144] as checkpoints store it; products and sums are float32.
            bias_E: Choice bias, float32 [256].
            experts: Weights.
            out_TH: Receives the sum, bfloat16 [T, 6144], contiguous, apart from `x_TH`.
            scaling: Factor on the routed experts' weights.

        Raises:
            ValueError: A tensor has another shape, dtype or device, does not begin at a multiple of 16 bytes (but for
                the bias), or there are too many tokens.
        """
        num_tokens = len(x_TH)
        if num_tokens > self._max_tokens:
            raise ValueError(f"at most {self._max_tokens} tokens, got {num_tokens}")
        check_layer(x_TH, router_EH, bias_E, experts, out_TH, width=self._width)
        if not num_tokens:
            return
        if num_tokens <= _FEW:
            cuda_kernel("moe_router.cu", "few_scores", macros=router_macros(), starts_early=True)(
                (EXPERTS // 8 * 4, 1, 1), 256, x_TH, router_EH, self._partial, self._counters, num_tokens
            )
        else:
            route_tokens(
                x_TH, router_EH, bias_E, partial=self._partial, expert_TC=self.expert_TC, weight_TC=self.weight_TC,
                counters=self._counters, scaling=scaling,
            )  # fmt: skip
        shape = next(shape for shape in SHAPES if num_tokens <= shape.max_tokens)
        kernel = cuda_kernel(
            "moe_experts.cu",
            "experts",
            macros=expert_macros(shape, self._width),
            shared_bytes=shared_bytes(shape),
            starts_early=True,
        )
        kernel(
            (self._num_blocks, 1, 1), num_threads(shape), x_TH, self._partial, bias_E, self.expert_TC,
            self.weight_TC, *experts, self._hidden, self._parts, out_TH, self._counters, scaling, num_tokens,
        )  # fmt: skip


def route_tokens(
    x_TH: torch.Tensor,
    router_EH: torch.Tensor,
    bias_E: torch.Tensor,
    *,
    partial: torch.Tensor,
    expert_TC: torch.Tensor,
    weight_TC: torch.Tensor,
    counters: torch.Tensor,
    scaling: float,
) -> None:
    """Launch the kernels of `moe_router.cu` that choose the experts of many tokens."""
    num_tokens = len(x_TH)
    macros = router_macros()
    cuda_kernel("moe_router.cu", "scores", macros=macros, starts_early=True)(
        (EXPERTS // 32 * _SLICES, min(2, -(-num_tokens // 32)), 1), 256, x_TH, router_EH, partial, num_tokens
    )
    cuda_kernel("moe_router.cu", "choose", macros=macros, starts_early=True)(
        (num_tokens, 1, 1), 128, partial, bias_E, expert_TC, weight_TC, counters, scaling, num_tokens
    )


def router_macros() -> Macros:
    """Give the constants that `moe_router.cu` is compiled with."""
    return (
        ("HIDDEN", HIDDEN),
        ("EXPERTS", EXPERTS),
        ("CHOSEN", CHOSEN),
        ("SLICES", _SLICES),
        ("COUNTERS", _COUNTERS),
    )


def expert_macros(shape: Shape, width: int) -> Macros:
    """Give the constants that `moe_experts.cu` is compiled with."""
    return (
        ("HIDDEN", HIDDEN),
        ("WIDTH", width),
        ("EXPERTS", EXPERTS),
        ("CHOSEN", CHOSEN),
        ("GROUPS", shape.groups),
        ("GROUPS_EACH", shape.groups_each),
        ("COLUMN_TILES", shape.column_tiles),
        ("STAGES", shape.stages),
        ("CREWS", shape.crews),
        ("MAX_TOKENS", shape.max_tokens),
        ("SHARED_BYTES", shared_bytes(shape)),
    )


def num_threads(shape: Shape) -> int:
    """Give the threads of a block: in each crew two teams of warps that multiply, and two that fetch."""
    return shape.crews * 32 * (2 * shape.groups // shape.groups_each + 2)


def shared_bytes(shape: Shape) -> int:
    """Give the size of the kernel's `Shared`."""
    columns, num_pairs = 8 * shape.column_tiles, shape.max_tokens * (CHOSEN + 1)
    stage = shape.groups * 4096 + min(columns, shape.max_tokens) * (512 + 16) + 16 + 3 * 8 + 4
    jobs = EXPERTS + 1 + num_pairs // columns
    if shape.max_tokens <= _FEW:
        jobs = shape.max_tokens * CHOSEN + 1
        num_pairs = jobs * columns
    ring, rest = shape.stages * stage, 8 * EXPERTS + 4 + 4 * jobs + 2 * num_pairs
    return shape.crews * _rounded_up(ring) + _rounded_up(rest)


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def check_layer(
    x_TH: torch.Tensor,
    router_EH: torch.Tensor,
    bias_E: torch.Tensor,
    experts: PackedExperts,
    out_TH: torch.Tensor,
    *,
    width: int,
) -> None:
    """Raise a ValueError that names the first tensor of another shape, dtype, place or device."""
    num_bytes = (EXPERTS + 1) * HIDDEN * width
    expected = {
        "x": (x_TH, torch.bfloat16, (len(x_TH), HIDDEN)),
        "router": (router_EH, torch.bfloat16, (EXPERTS, HIDDEN)),
        "bias": (bias_E, torch.float32, (EXPERTS,)),
        "gate_up": (experts.gate_up, torch.uint8, (2 * num_bytes,)),
        "gate_up_scale": (experts.gate_up_scale, torch.float32, (2 * num_bytes // 32768, 4)),
        "down": (experts.down, torch.uint8, (num_bytes,)),
        "down_scale": (experts.down_scale, torch.float32, (num_bytes // 32768, 4)),
        "out": (out_TH, torch.bfloat16, (len(x_TH), HIDDEN)),
    }
    for name, (tensor, dtype, shape) in expected.items():
        alignment = 1 if name == "bias" else _ALIGNMENT
        check_tensor(name, tensor, dtype, shape, device=x_TH.device, alignment=alignment)
