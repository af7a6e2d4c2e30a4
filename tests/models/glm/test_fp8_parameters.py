"""What stays in FP8 stands for the same values as what is dequantised, whole and cut, and only its bytes are read."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.block_fp8 import BLOCK_SIZE
from specdec.kernels.block_fp8_linear import SCALE_ROWS
from specdec.kernels.errors import ConfigError
from specdec.models.glm.checkpoint import LoadedCheckpoint, load_checkpoint
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.fp8_parameters import SCALE
from specdec.models.glm.parameters import TensorParallel
from tests.support.tiny_checkpoint import tiny_spec, write_tiny_checkpoint

# Latents of 512 and rope of 64: kv_a has 576 rows and 5 rows of scales, as in the released checkpoints.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_heads": 4,
    "q_lora_rank": 256,
    "weights": "fp8",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("fp8"), tiny_spec("real_dims", **SIZES))


def load(path: Path, *, keep_fp8: bool, **options: object) -> LoadedCheckpoint:
    return load_checkpoint(path, dtype=torch.float32, keep_fp8=keep_fp8, **options)  # type: ignore[arg-type]


def dequantised(values: torch.Tensor, scale_JB: torch.Tensor) -> torch.Tensor:
    rows_RC = values.float().flatten(0, -2)
    scale_RC = scale_JB.repeat_interleave(SCALE_ROWS, 0)[: len(rows_RC)].repeat_interleave(BLOCK_SIZE, 1)
    return (rows_RC * scale_RC).view(values.shape)


@pytest.mark.parametrize("split", list(ExpertSplit))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes_and_scales_stand_for_the_dequantised_values(checkpoint: Path, size: int, split: ExpertSplit) -> None:
    for rank in range(size):
        share = TensorParallel(rank=rank, size=size, expert_split=split)
        plain = load(checkpoint, keep_fp8=False, tensor_parallel=share)
        kept = load(checkpoint, keep_fp8=True, tensor_parallel=share)
        in_fp8 = {name for name, values in kept.parameters.items() if values.dtype == torch.float8_e4m3fn}
        assert {name + SCALE for name in in_fp8} == kept.parameters.keys() - plain.parameters.keys()
        for name, expected in plain.parameters.items():
            got = kept.parameters[name]
            if name in in_fp8:
                got = dequantised(got, kept.parameters[name + SCALE])
            assert torch.equal(got, expected), name
        assert kept.report.num_loaded == plain.report.num_loaded
        assert kept.report.bytes_read == plain.report.bytes_read


def test_what_is_multiplied_whole_stays_and_nothing_else(checkpoint: Path) -> None:
    parameters = load(checkpoint, keep_fp8=True).parameters
    in_fp8 = {name.split(".", 2)[-1] for name, each in parameters.items() if each.dtype == torch.float8_e4m3fn}
    assert in_fp8 == {
        *(f"attention.{name}" for name in ("qkv_a_proj", "q_b_proj", "o_proj")),
        *("indexer.wq_b", "indexer.wk", "mlp.gate_up_proj", "mlp.down_proj"),
        *(f"moe.{kind}_{name}_proj" for kind in ("expert", "shared") for name in ("gate_up", "down")),
    }
    scale_JB = parameters["layers.0.attention.qkv_a_proj" + SCALE]
    assert scale_JB.shape == ((256 + 576) // SCALE_ROWS, 256 // BLOCK_SIZE)
    assert parameters["layers.0.attention.kv_b_proj"].dtype == torch.float32


@pytest.mark.parametrize(
    ("sizes", "size", "message"),
    [
        ({"moe_intermediate_size": 160}, 1, r"moe\.expert_.*must be a multiple of"),
        ({"hidden_size": 144}, 1, r"qkv_a_proj cannot stay in FP8: of .*q_a_proj.weight its columns .* 128, got 144"),
        (
            {},
            4,
            r"mlp.down_proj cannot stay in FP8: .*its first column .* 128, got 64; take a tp_size that cuts between",
        ),
    ],
)
def test_a_cut_through_a_block_of_scales_is_refused(
    tmp_path: Path, sizes: dict[str, int], size: int, message: str
) -> None:
    sizes = SIZES | ({"intermediate_size": 256} if size > 1 else {}) | sizes
    write_tiny_checkpoint(tmp_path, tiny_spec("real_dims", **sizes))
    share = TensorParallel(rank=1, size=size) if size > 1 else TensorParallel()
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, keep_fp8=True, tensor_parallel=share)


def test_a_checkpoint_without_scales_loads_as_ever(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share"))
    kept, plain = load(tmp_path, keep_fp8=True).parameters, load(tmp_path, keep_fp8=False).parameters
    assert kept.keys() == plain.keys()
    assert all(torch.equal(kept[name], plain[name]) for name in plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="loads to a GPU")
@pytest.mark.parametrize("keep_fp8", [False, True])
def test_a_gpu_is_given_the_same_bits(tmp_path: Path, keep_fp8: bool) -> None:
    sizes = SIZES | {
        "hidden_size": 768,
        "intermediate_size": 12288,
        "num_layers": 2,
        "indexer_types": ("full", "shared"),
    }
    write_tiny_checkpoint(tmp_path, tiny_spec("real_dims", **sizes))  # the dense MLP takes several requests
    for share in (TensorParallel(), TensorParallel(rank=1, size=2)):
        here = load(tmp_path, keep_fp8=keep_fp8, tensor_parallel=share).parameters
        there = load(tmp_path, keep_fp8=keep_fp8, tensor_parallel=share, device="cuda").parameters
        assert here.keys() == there.keys()
        for name, expected in here.items():
            assert there[name].is_cuda
            assert torch.equal(there[name].cpu().view(torch.uint8), expected.view(torch.uint8)), name
