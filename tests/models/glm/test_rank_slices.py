"""Slices for the kernels hold the checkpoint's bytes and scales, joined and packed."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.block_fp8_linear import SCALE_ROWS, block_fp8_linear_ref
from specdec.kernels.errors import CheckpointError
from specdec.kernels.moe_experts import pack_down, pack_gate_up
from specdec.models.glm.checkpoint import LoadedCheckpoint, load_checkpoint
from specdec.models.glm.fingerprint import model_fingerprint
from specdec.models.glm.layer_slice import DenseSlice, LayerSlice, MixtureSlice, ModelSlice
from specdec.models.glm.parameters import TensorParallel
from specdec.models.glm.rank_slices import model_slice
from tests.support.tiny_checkpoint import tiny_spec, write_tiny_checkpoint

SIZES = {
    "hidden_size": 512,
    "q_lora_rank": 512,
    "num_heads": 4,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 4,
}
SHARE = TensorParallel(rank=1, size=2)
PARTS = ("expert", "shared")


def load(path: Path, dtype: torch.dtype, *, keep_fp8: bool) -> LoadedCheckpoint:
    return load_checkpoint(path, dtype=dtype, tensor_parallel=SHARE, keep_fp8=keep_fp8)


def sliced(loaded: LoadedCheckpoint) -> ModelSlice:
    return model_slice(loaded.config, dict(loaded.parameters), max_rows=8, tp_rank=SHARE.rank, tp_size=SHARE.size)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("slices"), tiny_spec("real_dims", weights="fp8", **SIZES))


def test_a_slice_multiplies_as_the_loaded_parameters_do(path: Path) -> None:
    loaded, plain = load(path, torch.bfloat16, keep_fp8=True), load(path, torch.float32, keep_fp8=False).parameters
    slices = sliced(loaded).layers
    assert [type(layer.mlp) for layer in slices] == [DenseSlice, MixtureSlice, MixtureSlice]
    assert [layer.attention.indexer is not None for layer in slices] == [True, True, False]
    for number, layer in enumerate(slices):
        check_layer(layer, plain, f"layers.{number}")


def test_the_mtp_layer_s_slice_has_the_rank_s_columns_and_a_form_that_chooses_nothing(path: Path) -> None:
    loaded, plain = load(path, torch.bfloat16, keep_fp8=True), load(path, torch.float32, keep_fp8=False).parameters
    mtp = sliced(loaded).mtp
    assert mtp is not None
    check_layer(mtp.layer, plain, "mtp.layer")
    check_layer(mtp.recycled, plain, "mtp.layer")
    assert mtp.recycled.attention.indexer is None
    assert mtp.recycled.attention.q_b.weight_OI.data_ptr() == mtp.layer.attention.q_b.weight_OI.data_ptr()
    assert mtp.first_column == 512
    assert torch.equal(mtp.eh_proj, plain["mtp.eh_proj"][:, 512:].bfloat16())
    for name, parameter in (("enorm", "enorm"), ("hnorm", "hnorm"), ("head_norm", "shared_head_norm")):
        assert torch.equal(getattr(mtp, name), plain[f"mtp.{parameter}"].bfloat16())


def test_the_vocabulary_s_slice_begins_at_the_rank_s_first_id(path: Path) -> None:
    loaded = load(path, torch.bfloat16, keep_fp8=True)
    vocabulary = sliced(loaded).vocabulary
    assert vocabulary.first_id == loaded.config.vocab_size // 2 == len(vocabulary.embedding_VH)
    assert torch.equal(vocabulary.embedding_VH, loaded.parameters["embed_tokens"])
    assert torch.equal(vocabulary.head_VH, loaded.parameters["lm_head"])


def check_layer(layer: LayerSlice, plain: dict[str, torch.Tensor], prefix: str) -> None:
    """A slice's products and norms are those of the parameters that were loaded for `GlmTarget`."""
    x_TI = torch.randn(3, 512)
    joined = {"qkv_a": ["attention.qkv_a_proj"], "q_b": ["attention.q_b_proj"], "o": ["attention.o_proj"]}
    if layer.attention.indexer is not None:
        joined["qkv_a"].append("indexer.wk")
        joined["q_b"].append("indexer.wq_b")
    for name, parts in joined.items():
        linear = getattr(layer.attention, name)
        weight_OI = torch.cat([plain[f"{prefix}.{part}"] for part in parts])
        got = block_fp8_linear_ref(x_TI, linear.weight_OI, linear.scale_JB)
        expected = x_TI.double() @ weight_OI.double().T
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    kv_b = torch.cat((layer.attention.key_up_ANL, layer.attention.value_up_ALV.transpose(1, 2)), dim=1)
    assert torch.equal(kv_b, plain[f"{prefix}.attention.kv_b_proj"].bfloat16())
    assert torch.equal(layer.attention.kv_a_norm, plain[f"{prefix}.attention.kv_a_layernorm"].bfloat16())
    assert torch.equal(layer.input_norm, plain[f"{prefix}.input_layernorm"].bfloat16())


def test_experts_are_packed_with_the_shared_one_behind_them(path: Path) -> None:
    loaded, plain = load(path, torch.bfloat16, keep_fp8=True), load(path, torch.float32, keep_fp8=False).parameters
    mlp = sliced(loaded).layers[1].mlp
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


def test_what_was_copied_leaves_a_sample_behind_that_tells_checkpoints_apart(path: Path) -> None:
    loaded = load(path, torch.bfloat16, keep_fp8=True)
    before = dict(loaded.parameters)
    model_slice(loaded.config, loaded.parameters, max_rows=8, tp_rank=SHARE.rank, tp_size=SHARE.size)
    copied = {name for name, parameter in loaded.parameters.items() if parameter is not before[name]}
    assert {name.removesuffix(".scale").rpartition(".")[2] for name in copied} == {
        "qkv_a_proj", "q_b_proj", "wk", "wq_b",
        "expert_gate_up_proj", "expert_down_proj", "shared_gate_up_proj", "shared_down_proj",
    }  # fmt: skip
    assert all(loaded.parameters[name].dim() == 1 for name in copied)
    for of_mtp in (False, True):
        ours, whole = (
            model_fingerprint(loaded.config, parameters, latent_norm_eps=None, of_mtp=of_mtp)
            for parameters in (loaded.parameters, before)
        )
        assert ours == whole


def test_a_checkpoint_that_is_not_in_fp8_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("real_dims", weights="bfloat16", **SIZES))
    loaded = load(tmp_path, torch.bfloat16, keep_fp8=True)
    with pytest.raises(CheckpointError, match=r"layers.0.attention.qkv_a_proj is torch.bfloat16, the kernels take"):
        sliced(loaded)


def test_a_router_with_more_bits_than_bfloat16_is_refused(path: Path) -> None:
    loaded = load(path, torch.bfloat16, keep_fp8=True)
    loaded.parameters["layers.1.moe.router"][0, 0] = 1 / 3
    with pytest.raises(CheckpointError, match=r"layers.1.moe.router has values that bfloat16, in which the kernels"):
        sliced(loaded)
