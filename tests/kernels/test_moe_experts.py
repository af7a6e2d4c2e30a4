"""A mixture layer's weights lie as told, it is routing and experts by definition, and a GPU gives a token its bits."""

import random

import pytest
import torch
from torch.nn.functional import linear, silu

from specdec.kernels.expert_routing import Routing, route
from specdec.kernels.gated_mlp import expert_mlp_ref
from specdec.kernels.moe_experts import (
    CHOSEN,
    EXPERTS,
    HIDDEN,
    MAX_TOKENS,
    SHAPES,
    WIDTH,
    WIDTHS,
    MixtureLayer,
    PackedExperts,
    Shape,
    check_layer,
    expert_macros,
    moe_ref,
    pack_down,
    pack_gate_up,
    router_macros,
)
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu
from tests.support.misaligned import misaligned

Bank = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
LAST_BYTE = 0x7E  # the largest finite e4m3


def random_fp8(*shape: int, device: str = "cpu") -> torch.Tensor:
    """Draw any finite values, subnormals and both zeros included."""
    byte = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    return torch.where(byte & 0x7F > LAST_BYTE, 0, byte).view(torch.float8_e4m3fn)


def random_bank(num_experts: int, hidden: int, width: int, device: str = "cpu") -> Bank:
    return [
        (
            random_fp8(2 * width, hidden, device=device),
            torch.rand(2 * width // 128, hidden // 128, device=device) * 3e-4 + 1e-5,
            random_fp8(hidden, width, device=device),
            torch.rand(hidden // 128, width // 128, device=device) * 3e-4 + 1e-5,
        )
        for _ in range(num_experts)
    ]


def byte_of(*, tile: int, num_steps: int, k: int, group: int, high: int, row: int) -> int:
    """Place of a weight in a packed expert: input k of row 0-7, of the low or high half, of a group of a tile."""
    step, block, half, quarter, four = k // 256, k // 128 % 2, k // 64 % 2, k // 16 % 4, k // 4 % 4
    lane = row * 4 + quarter
    within = ((((group * 2 + block) * 2 + half) * 2 + high) * 32 + lane) * 16 + four * 4
    return (tile * num_steps + step) * 32768 + within + (1, 3, 0, 2)[k % 4]


def test_each_weight_and_scale_of_gate_and_up_has_its_place() -> None:
    q, scale = random_fp8(2, 2 * WIDTH, 512), torch.rand(2, 2 * WIDTH // 128, 4)
    packed, packed_scale = pack_gate_up(q, scale)
    for _ in range(500):
        e, up, m, k = random.randrange(2), random.randrange(2), random.randrange(WIDTH), random.randrange(512)
        place = byte_of(tile=m // 64, num_steps=2, k=k, group=m // 8 % 8, high=up, row=m % 8)
        assert packed.view(2, -1)[e, place] == q.view(torch.uint8)[e, up * WIDTH + m, k]
        piece = m // 64 * 2 + k // 256
        assert (
            packed_scale.view(2, -1, 4)[e, piece, up * 2 + k // 128 % 2] == scale[e, (up * WIDTH + m) // 128, k // 128]
        )


def test_each_weight_and_scale_of_down_has_its_place() -> None:
    q, scale = random_fp8(2, 512, WIDTH), torch.rand(2, 4, 2)
    packed, packed_scale = pack_down(q, scale)
    for _ in range(500):
        e, h, k, high = random.randrange(2), random.randrange(512), random.randrange(WIDTH), random.randrange(2)
        place = byte_of(tile=h // 128, num_steps=1, k=k, group=h // 16 % 8, high=h % 2, row=h // 2 % 8)
        assert packed.view(2, -1)[e, place] == q.view(torch.uint8)[e, h, k]
        assert packed_scale.view(2, -1, 4)[e, h // 128, high * 2 + k // 128] == scale[e, h // 128, k // 128]


def test_the_definition_is_the_routed_experts_and_the_shared_one() -> None:
    bank = random_bank(9, 256, 128)
    x, router, bias = torch.randn(8, 256).bfloat16(), torch.randn(8, 256).bfloat16(), torch.randn(8)
    out, routing = moe_ref(x, router, bias, bank, num_chosen=3, scaling=2.5)
    expected = route(
        x, router.float(), bias, num_chosen=3, num_groups=1, num_chosen_groups=1, normalise=True, scaling=2.5
    )
    assert torch.equal(routing.expert_TC, expected.expert_TC)
    values = [
        [q.double() * s.double().repeat_interleave(128, 0).repeat_interleave(128, 1) for q, s in (each[:2], each[2:])]
        for each in bank
    ]
    gate_up, down = (torch.stack([value[i] for value in values]) for i in range(2))
    routed = expert_mlp_ref(x.double(), Routing(routing.expert_TC, routing.weight_TC.double()), gate_up, down)
    gate, up = linear(x.double(), gate_up[-1]).chunk(2, dim=-1)
    torch.testing.assert_close(out, routed + linear(silu(gate) * up, down[-1]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [WIDTH, WIDTHS[-1]])
def test_the_experts_compile_for_hopper_and_spill_nothing(shape: Shape, width: int) -> None:
    assert most_bytes_spilled("moe_experts.cu", expert_macros(shape, width)) == 0


def test_the_router_compiles_for_hopper_and_spills_nothing() -> None:
    assert most_bytes_spilled("moe_router.cu", router_macros()) == 0


def empty_packed() -> PackedExperts:
    size = (EXPERTS + 1) * HIDDEN * WIDTH
    return PackedExperts(
        torch.empty(2 * size, dtype=torch.uint8, device="meta"),
        torch.empty(2 * size // 32768, 4, device="meta"),
        torch.empty(size, dtype=torch.uint8, device="meta"),
        torch.empty(size // 32768, 4, device="meta"),
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("x_TH", torch.empty(3, HIDDEN, device="meta")),
        ("x_TH", torch.empty(3, HIDDEN - 1, dtype=torch.bfloat16, device="meta")),
        ("router_EH", torch.empty(EXPERTS, HIDDEN, device="meta")),
        ("bias_E", torch.empty(EXPERTS, dtype=torch.bfloat16, device="meta")),
        ("out_TH", torch.empty(HIDDEN, 3, dtype=torch.bfloat16, device="meta").t()),
        ("router_EH", torch.empty(EXPERTS, HIDDEN, dtype=torch.bfloat16)),
    ],
)
def test_other_shapes_dtypes_and_devices_are_refused_by_name(name: str, wrong: torch.Tensor) -> None:
    tensors = {
        "x_TH": torch.empty(3, HIDDEN, dtype=torch.bfloat16, device="meta"),
        "router_EH": torch.empty(EXPERTS, HIDDEN, dtype=torch.bfloat16, device="meta"),
        "bias_E": torch.empty(EXPERTS, device="meta"),
        "out_TH": torch.empty(3, HIDDEN, dtype=torch.bfloat16, device="meta"),
    }
    with pytest.raises(ValueError, match=f"{name.rpartition('_')[0]} must be"):
        check_layer(experts=empty_packed(), width=WIDTH, **(tensors | {name: wrong}))


def test_tokens_that_the_kernels_cannot_load_16_bytes_at_once_are_refused() -> None:
    x_TH, bias_E = torch.zeros(3, HIDDEN, dtype=torch.bfloat16), torch.zeros(EXPERTS)
    router_EH = torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x must begin at a multiple of 16 bytes"):
        check_layer(misaligned(x_TH), router_EH, bias_E, empty_packed(), x_TH, width=WIDTH)
    with pytest.raises(ValueError, match="router must begin at a multiple of 16 bytes"):
        check_layer(x_TH, misaligned(router_EH), bias_E, empty_packed(), x_TH, width=WIDTH)


@pytest.fixture(scope="module")
def bank() -> Bank:
    return random_bank(EXPERTS + 1, HIDDEN, WIDTH, device="cuda")


@pytest.fixture(scope="module")
def packed(bank: Bank) -> PackedExperts:
    return pack(bank)


def pack(bank: Bank) -> PackedExperts:
    gate_up, gate_up_scale, down, down_scale = (torch.stack(each) for each in zip(*bank, strict=True))
    return PackedExperts(*pack_gate_up(gate_up, gate_up_scale), *pack_down(down, down_scale))


def hostile_tokens() -> torch.Tensor:
    """Draw large, tiny, zero and equal tokens: equal ones fill a few experts past one job."""
    x = torch.randn(MAX_TOKENS, HIDDEN, device="cuda")
    x[1] *= 1e4
    x[2] *= 1e-4
    x[5] = 0
    x[100:160] = x[99]
    return x.bfloat16()


def run(
    layer: MixtureLayer, x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor, packed: PackedExperts
) -> torch.Tensor:
    out = torch.full_like(x, torch.nan)
    layer(x, router, bias, packed, out, scaling=2.5)
    return out


@needs_gpu
def test_a_gpu_computes_the_layer_and_a_token_alone_has_the_same_bits(bank: Bank, packed: PackedExperts) -> None:
    layer = MixtureLayer(torch.device("cuda"))
    x = hostile_tokens()
    router, bias = torch.randn(EXPERTS, HIDDEN, device="cuda").bfloat16() * 0.02, torch.randn(EXPERTS, device="cuda")
    expected, routing = moe_ref(x, router, bias, bank, num_chosen=CHOSEN, scaling=2.5)
    whole = run(layer, x, router, bias, packed)
    # A choice between nearly equal scores may differ by the order of a sum; such tokens are left out.
    same = (layer.expert_TC == routing.expert_TC).all(dim=1)
    assert same.float().mean() > 0.99
    torch.testing.assert_close(layer.weight_TC[same], routing.weight_TC[same], rtol=1e-5, atol=1e-6)
    error_T = (whole.double() - expected)[same].norm(dim=1) / expected[same].norm(dim=1).clamp_min(1e-30)
    assert error_T.max() < 5e-3  # bfloat16 hidden values, parts and sum
    expert_TC, weight_TC = layer.expert_TC.clone(), layer.weight_TC.clone()
    few = (slice(0, 1), slice(4, 6), slice(98, 101), slice(0, 6), slice(1, 9), slice(99, 107))  # 99 to 159 are equal
    for rows in (*few, slice(3, 12), slice(95, 191), slice(500, 768)):
        assert torch.equal(run(layer, x[rows].contiguous(), router, bias, packed), whole[rows]), rows
        num_tokens = rows.stop - rows.start
        assert torch.equal(layer.expert_TC[:num_tokens], expert_TC[rows]), rows
        assert torch.equal(layer.weight_TC[:num_tokens], weight_TC[rows]), rows


@needs_gpu
@pytest.mark.parametrize("width", WIDTHS[1:])
def test_a_gpu_computes_wider_slices(width: int) -> None:
    bank = random_bank(EXPERTS + 1, HIDDEN, width, device="cuda")
    packed = pack(bank)
    layer = MixtureLayer(torch.device("cuda"), max_tokens=40, width=width)
    x = hostile_tokens()[95:135].contiguous()
    router, bias = torch.randn(EXPERTS, HIDDEN, device="cuda").bfloat16() * 0.02, torch.randn(EXPERTS, device="cuda")
    expected, routing = moe_ref(x, router, bias, bank, num_chosen=CHOSEN, scaling=2.5)
    whole = run(layer, x, router, bias, packed)
    same = (layer.expert_TC == routing.expert_TC).all(dim=1)
    assert same.float().mean() > 0.9
    assert float((whole.double() - expected)[same].norm() / expected[same].norm()) < 5e-3
    for rows in (slice(0, 1), slice(2, 8), slice(0, 20)):
        assert torch.equal(run(layer, x[rows].contiguous(), router, bias, packed), whole[rows]), rows


@needs_gpu
def test_a_graph_replays_the_layer_on_new_tokens(packed: PackedExperts) -> None:
    layer = MixtureLayer(torch.device("cuda"), max_tokens=6)
    router, bias = torch.randn(EXPERTS, HIDDEN, device="cuda").bfloat16() * 0.02, torch.randn(EXPERTS, device="cuda")
    first, second = (torch.randn(6, HIDDEN, device="cuda").bfloat16() for _ in range(2))
    expected = [run(layer, x, router, bias, packed) for x in (first, second)]
    x, out = first.clone(), torch.empty_like(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, router, bias, packed, out, scaling=2.5)
    for tokens, wanted in zip((first, second), expected, strict=True):
        x.copy_(tokens)
        graph.replay()
        assert torch.equal(out, wanted)


@needs_gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 6, 40])
def test_layers_that_follow_each_other_give_the_bits_of_layers_apart(packed: PackedExperts, num_tokens: int) -> None:
    layer = MixtureLayer(torch.device("cuda"), max_tokens=num_tokens)
    routers = torch.randn(4, EXPERTS, HIDDEN, device="cuda").bfloat16() * 0.02
    biases = torch.randn(4, EXPERTS, device="cuda")
    x = torch.empty(5, num_tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    x[0] = torch.randn(num_tokens, HIDDEN, device="cuda")

    def layers(*, apart: bool) -> None:
        for number in range(4):  # a layer reads what the one before wrote
            layer(x[number], routers[number], biases[number], packed, x[number + 1], scaling=2.5)
            if apart:
                torch.cuda.synchronize()

    layers(apart=True)
    expected = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(apart=False)
    for _ in range(10):
        x[1:] = torch.nan
        graph.replay()
        assert torch.equal(x, expected)
