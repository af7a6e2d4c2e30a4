"""Slices for the kernels hold the checkpoint's bytes and scales, joined and packed."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.block_fp8_linear import SCALE_ROWS, block_fp8_linear_ref
from specdec.kernels.errors import CheckpointError
from specdec.kernels.moe_experts import pack_down, pack_gate_up
from specdec.models.glm.checkpoint import LoadedCheckpoint, load_checkpoint
from specdec.models.glm.parameters import TensorParallel
from specdec.models.glm.rank_pass import DenseSlice, MixtureSlice
from specdec.models.glm.rank_slices import layer_slices
from tests.support.tiny_checkpoint import tiny_spec, write_tiny_checkpoint

SIZES = {
    "hidden_size": 512,
    "q_lora_rank": 512,
    "num_heads": 4,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 4,
    "mtp": False,
}
SHARE = TensorParallel(rank=1, size=2)
PARTS = ("expert", "shared")


def load(path: Path, dtype: torch.dtype, *, keep_fp8: bool) -> LoadedCheckpoint:
    return load_checkpoint(path, dtype=dtype, tensor_parallel=SHARE, keep_fp8=keep_fp8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("slices"), tiny_spec("real_dims", weights="fp8", **SIZES))


def test_a_slice_multiplies_as_the_loaded_parameters_do(path: Path) -> None:
    loaded, plain = load(path, torch.bfloat16, keep_fp8=True), load(path, torch.float32, keep_fp8=False).parameters
    slices = layer_slices(loaded.config, loaded.parameters, max_rows=8)
    assert [type(layer.mlp) for layer in slices] == [DenseSlice, MixtureSlice, MixtureSlice]
    assert [layer.attention.indexer is not None for layer in slices] == [True, True, False]
    x_TI = torch.randn(3, 512)
    for number, layer in enumerate(slices):
        prefix = f"layers.{number}"
        joined = {
            "qkv_a": ["attention.qkv_a_proj", "indexer.wk"],
            "q_b": ["attention.q_b_proj", "indexer.wq_b"],
            "o": ["attention.o_proj"],
        }
        for name, parts in joined.items():
            linear = getattr(layer.attention, name)
            weight_OI = torch.cat([plain[f"{prefix}.{part}"] for part in parts if f"{prefix}.{part}" in plain])
            got = block_fp8_linear_ref(x_TI, linear.weight_OI, linear.scale_JB)
            expected = x_TI.double() @ weight_OI.double().T
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
        kv_b = torch.cat((layer.attention.key_up_ANL, layer.attention.value_up_ALV.transpose(1, 2)), dim=1)
        assert torch.equal(kv_b, plain[f"{prefix}.attention.kv_b_proj"].bfloat16())
        assert torch.equal(layer.attention.kv_a_norm, plain[f"{prefix}.attention.kv_a_layernorm"].bfloat16())
        assert torch.equal(layer.input_norm, plain[f"{prefix}.input_layernorm"].bfloat16())


def test_experts_are_packed_with_the_shared_one_behind_them(path: Path) -> None:
    loaded, plain = load(path, torch.bfloat16, keep_fp8=True), load(path, torch.float32, keep_fp8=False).parameters
    mlp = layer_slices(loaded.config, loaded.parameters, max_rows=8)[1].mlp
    assert isinstance(mlp, MixtureSlice)
    assert torch.equal(mlp.router.float(), plain["layers.1.moe.router"])
    assert torch.equal(mlp.bias, plain["layers.1.moe.router_bias"])
    for kind, pack in (("gate_up", pack_gate_up), ("down", pack_down)):
        values = [loaded.parameters[f"layers.1.moe.{part}_{kind}_proj"].view(torch.uint8) for part in PARTS]
        values = torch.cat((values[0], values[1][None]))
        scales = torch.cat([loaded.parameters[f"layers.1.moe.{part}_{kind}_proj.scale"] for part in PARTS])
        blocks = scales.view(5, values.shape[1] // SCALE_ROWS, -1)
        assert torch.equal(blocks[:, ::2], blocks[:, 1::2])
        packed, packed_scale = pack(values.view(torch.float8_e4m3fn), blocks[:, ::2])
        assert torch.equal(getattr(mlp.experts, kind), packed)
        assert torch.equal(getattr(mlp.experts, f"{kind}_scale"), packed_scale)


def test_a_checkpoint_that_is_not_in_fp8_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("real_dims", weights="bfloat16", **SIZES))
    loaded = load(tmp_path, torch.bfloat16, keep_fp8=True)
    with pytest.raises(CheckpointError, match=r"layers.0.attention.qkv_a_proj is torch.bfloat16, the kernels take"):
        layer_slices(loaded.config, loaded.parameters, max_rows=8)


def test_a_router_with_more_bits_than_bfloat16_is_refused(path: Path) -> None:
    loaded = load(path, torch.bfloat16, keep_fp8=True)
    loaded.parameters["layers.1.moe.router"][0, 0] = 1 / 3
    with pytest.raises(CheckpointError, match=r"layers.1.moe.router has values that bfloat16, in which the kernels"):
        layer_slices(loaded.config, loaded.parameters, max_rows=8)
