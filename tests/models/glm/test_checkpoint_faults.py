"""Every way in which a checkpoint can be damaged has its own message, with the file and the tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec.kernels.errors import CheckpointError, SpecdecError
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.ledger import Ledger
from tests.support.byte_tokenizer import write_tokenizer
from tests.support.tiny_checkpoint import Weights, read_tensors, tiny_spec, write_shards, write_tiny_checkpoint

SECOND = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
DEEP = b'{"a":' * 100_000
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"


def refusal(path: Path) -> str:
    """The message with which a checkpoint is refused."""
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, dtype=torch.float32)
    return str(error.value)


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], Any], *, weights: Weights = "float32") -> Path:
    """A checkpoint in one file whose tensors went through `change`."""
    write_tiny_checkpoint(path, tiny_spec("share", weights=weights))
    tensors = read_tensors(path)
    change(tensors)
    write_shards(path, tensors, num_shards=1)
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A sound checkpoint in three files with an index."""
    return write_tiny_checkpoint(tmp_path, tiny_spec("share", num_shards=3))


def test_a_shard_that_the_index_names_is_not_on_disk(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    message = refusal(sharded)
    assert str(sharded / SECOND) in message
    assert "missing" in message
    assert "places model." in message


def test_an_empty_shard(sharded: Path) -> None:
    (sharded / SECOND).write_bytes(b"")
    assert f"{sharded / SECOND}: the file is empty" in refusal(sharded)


@pytest.mark.parametrize("kept", [3, 8, 100, -1, -1000])
def test_a_truncated_shard(sharded: Path, kept: int) -> None:
    content = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(content[:kept])
    message = refusal(sharded)
    assert f"{sharded / SECOND}: truncated" in message
    if kept < 0:
        assert f"the file at {len(content) + kept}" in message
    assert "download it again" in message


def test_a_shard_with_bytes_after_its_end(sharded: Path) -> None:
    with (sharded / SECOND).open("ab") as file:
        file.write(b"xyz")
    assert f"{sharded / SECOND}: 3 bytes more than its header describes" in refusal(sharded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "is a Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "not a safetensors file"),
        ((4).to_bytes(8, "little") + b"{{{{", "in the header: not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "in the header: must hold a JSON object"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "the header entry of a is malformed"),
        ((17).to_bytes(8, "little") + b'{"a": {},"a": {}}', "the key 'a' stands in it twice"),
        (len(DEEP).to_bytes(8, "little") + DEEP, "nested too deeply"),
    ],
)
def test_a_file_that_is_not_safetensors(sharded: Path, content: bytes, message: str) -> None:
    (sharded / SECOND).write_bytes(content)
    refused = refusal(sharded)
    assert str(sharded / SECOND) in refused
    assert message in refused


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "takes 8 bytes, its header entry gives bytes 0 to 4"),
        ({"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}, "has the dtype 'F99'"),
        ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "has the dtype ['F32']"),
        ({"dtype": "F32", "shape": [1], "data_offsets": ["a", "b"]}, "is malformed: shape and data_offsets must be"),
        ({"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}, "is malformed: shape and data_offsets must be"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "is malformed: shape and data_offsets must be"),
    ],
)
def test_a_header_entry_that_contradicts_itself(sharded: Path, entry: dict[str, Any], message: str) -> None:
    header = json.dumps({"lm_head.weight": entry}).encode()
    (sharded / SECOND).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refused = refusal(sharded)
    assert str(sharded / SECOND) in refused
    assert "lm_head.weight" in refused
    assert message in refused


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((0, 0), "b overlaps a (begins at byte {data}, not {next})"),
        ((4, 12), "a leaves a gap behind the header"),
        ((0, 12), "b leaves a gap behind a"),
    ],
)
def test_tensors_that_do_not_lie_one_behind_the_other(sharded: Path, starts: tuple[int, int], message: str) -> None:
    entries = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]}
        for name, start in zip("ab", starts, strict=True)
    }
    header = json.dumps(entries).encode()
    (sharded / SECOND).write_bytes(len(header).to_bytes(8, "little") + header + bytes(max(starts) + 8))
    data = 8 + len(header)
    assert f"{sharded / SECOND}: {message.format(data=data, next=data + 8)}" in refusal(sharded)


@pytest.mark.parametrize("kind", ["directory", "link to a file that is gone"])
def test_weights_that_are_no_file(tmp_path: Path, kind: str) -> None:
    weights = write_tiny_checkpoint(tmp_path, tiny_spec("share")) / "model.safetensors"
    weights.unlink()
    if kind == "directory":
        weights.mkdir()
    else:
        weights.symlink_to(tmp_path / "blobs" / "gone")
    message = refusal(tmp_path)
    assert f"{weights}: is no file" in message
    assert "download it again" in message


def test_end_ids_and_tokenizers_of_another_checkpoint(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 512]}')
    message = refusal(tmp_path)
    assert f"{tmp_path / 'generation_config.json'}: eos_token_id 512 is outside the vocabulary" in message
    assert "vocab_size 512 in config.json" in message
    (tmp_path / "generation_config.json").unlink()
    write_tokenizer(tmp_path / "tokenizer.json", num_extra_tokens=600)
    (warning,) = load_checkpoint(tmp_path, dtype=torch.float32).report.warnings
    assert f"{tmp_path / 'tokenizer.json'}: has token ids up to" in warning
    assert "vocab_size in config.json is 512" in warning


def test_a_tensor_that_the_index_places_in_a_shard_without_it(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name = next(name for name, shard in index["weight_map"].items() if shard != SECOND)
    index["weight_map"][name] = SECOND
    (sharded / INDEX).write_text(json.dumps(index))
    message = refusal(sharded)
    assert f"{sharded / SECOND}: lacks {name}" in message
    assert "it is in model-0000" in message


def test_a_tensor_that_the_index_does_not_know(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["lm_head.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    message = refusal(sharded)
    assert f"holds lm_head.weight, which {INDEX} does not know" in message


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    shard = sharded / SECOND
    other = sharded / "model-00003-of-00003.safetensors"
    (shard_name, tensor), *_ = read_tensors(sharded).items()
    for path in (shard, other):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        tensors = {name: value for name, value in read_tensors(sharded).items() if name in header}
        save_file(tensors | {shard_name: tensor}, path)
    message = refusal(sharded)
    assert f"holds {shard_name}, and so does" in message


@pytest.mark.parametrize(
    "content",
    [
        DEEP.decode(),
        '{"weight_map": {"a": "b", "a": "c"}}',
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../b"}}',
        '{"weight_map": {"a": 1}}',
    ],
)
def test_a_damaged_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    assert str(sharded / INDEX) in refusal(sharded)


def test_shards_without_their_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert f"neither model.safetensors nor {INDEX}" in refusal(sharded)


def test_a_file_beside_the_shards_is_left_out_and_reported(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"")
    report = load_checkpoint(sharded, dtype=torch.float32).report
    assert report.ignored_files == ("consolidated.safetensors",)


def test_no_such_directory(tmp_path: Path) -> None:
    assert f"{tmp_path / 'absent'}: no such directory" in refusal(tmp_path / "absent")


def test_no_config(sharded: Path) -> None:
    (sharded / "config.json").unlink()
    assert f"{sharded / 'config.json'}: cannot be read" in refusal(sharded)


@pytest.mark.parametrize("name", ["lm_head.weight", EXPERT, "model.layers.1.mlp.gate.e_score_correction_bias"])
def test_a_missing_tensor(tmp_path: Path, name: str) -> None:
    message = refusal(changed(tmp_path, lambda tensors: tensors.pop(name)))
    assert f"{tmp_path}: no file holds {name}, which config.json calls for" in message


def test_a_full_layer_without_its_indexer(tmp_path: Path) -> None:
    indexer = "model.layers.2.self_attn.indexer."

    def remove(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(indexer)]:
            del tensors[name]

    message = refusal(changed(tmp_path, remove))
    assert f"{indexer}wq_b.weight and 4 more tensors" in message
    assert "layer 2 is 'full' in indexer_types and must own an indexer" in message


def test_without_a_list_every_layer_must_own_an_indexer(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share", config_changes={"indexer_types": None}))
    message = refusal(tmp_path)
    assert "model.layers.1.self_attn.indexer.wq_b.weight and 9 more tensors" in message
    assert "layer 1 is 'full'" in message


def test_an_mtp_layer_stored_in_part(tmp_path: Path) -> None:
    message = refusal(changed(tmp_path, lambda tensors: tensors.pop("model.layers.4.eh_proj.weight")))
    assert "model.layers.4.eh_proj.weight" in message
    assert "the MTP layer is stored in part" in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.experts.8.up_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_a_proj.bias",
        "model.embed_positions.weight",
        "layers.0.input_layernorm.weight",
    ],
)
def test_a_tensor_that_nothing_reads(tmp_path: Path, name: str) -> None:
    message = refusal(changed(tmp_path, lambda tensors: tensors.update({name: torch.ones(2)})))
    assert f"{tmp_path / 'model.safetensors'}: holds {name}, which no part of the model reads" in message


def test_experts_fused_into_one_tensor(tmp_path: Path) -> None:
    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        prefix = "model.layers.2.mlp.experts."
        gate_up = [
            torch.cat([tensors.pop(f"{prefix}{e}.gate_proj.weight"), tensors.pop(f"{prefix}{e}.up_proj.weight")])
            for e in range(8)
        ]
        tensors[f"{prefix}gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{prefix}down_proj"] = torch.stack([tensors.pop(f"{prefix}{e}.down_proj.weight") for e in range(8)])

    message = refusal(changed(tmp_path, fuse))
    assert "model.layers.2.mlp.experts.gate_up_proj holds all experts of the layer in one tensor" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize(("name", "shape"), [(EXPERT, (144, 136)), ("lm_head.weight", (511, 144)), (KV_A, (40,))])
def test_a_wrong_shape(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    message = refusal(changed(tmp_path, lambda tensors: tensors.update({name: torch.ones(shape)})))
    assert f"{tmp_path / 'model.safetensors'}: {name} has the shape {list(shape)}, config.json makes it" in message


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float64, torch.float8_e5m2])
def test_a_wrong_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    message = refusal(changed(tmp_path, lambda tensors: tensors.update({KV_A: tensors[KV_A].to(dtype)})))
    assert f"{KV_A} has the dtype {str(dtype).removeprefix('torch.')}" in message


def test_fp8_in_a_vector_has_no_meaning(tmp_path: Path) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)

    assert "model.norm.weight has the dtype float8_e4m3fn" in refusal(changed(tmp_path, quantise, weights="fp8"))


def test_fp8_weights_in_a_checkpoint_that_does_not_say_so(tmp_path: Path) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors[KV_A] = tensors[KV_A].to(torch.float8_e4m3fn)

    message = refusal(changed(tmp_path, quantise))
    assert f"{KV_A} is FP8, but config.json has no quantization_config" in message


@pytest.mark.parametrize("name", [KV_A, EXPERT, "model.layers.4.mlp.experts.0.gate_proj.weight"])
def test_a_missing_scale(tmp_path: Path, name: str) -> None:
    message = refusal(changed(tmp_path, lambda tensors: tensors.pop(f"{name}_scale_inv"), weights="fp8"))
    assert f"{tmp_path / 'model.safetensors'}: {name} is FP8 and its scale {name}_scale_inv is in no file" in message


def test_a_scale_of_the_wrong_shape(tmp_path: Path) -> None:
    name = f"{EXPERT}_scale_inv"
    message = refusal(changed(tmp_path, lambda tensors: tensors.update({name: torch.ones(1, 2)}), weights="fp8"))
    assert f"{name} has the shape [1, 2], must be [2, 2]" in message


def test_a_scale_of_the_wrong_dtype(tmp_path: Path) -> None:
    name = f"{EXPERT}_scale_inv"
    message = refusal(
        changed(tmp_path, lambda tensors: tensors.update({name: tensors[name].bfloat16()}), weights="fp8")
    )
    assert f"{name} has the dtype bfloat16, must be float32" in message


def test_a_scale_beside_a_weight_that_is_not_fp8(tmp_path: Path) -> None:
    name = f"{EXPERT}_scale_inv"
    message = refusal(changed(tmp_path, lambda tensors: tensors.update({name: torch.ones(2, 2)})))
    assert f"holds the scale {name}, but {EXPERT} is float32 and needs none" in message


def test_every_fault_is_an_error_of_ours(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(SpecdecError):
        load_checkpoint(sharded, dtype=torch.float32)


def make_ledger() -> Ledger:
    ledger = Ledger(parameter_rows={"a": 5}, tensors=["x", "y"])
    ledger.write("a", first_row=0, num_rows=3)
    ledger.use("x")
    return ledger


def test_a_settled_ledger_has_every_row_written_once_and_every_tensor_accounted_for() -> None:
    ledger = make_ledger()
    ledger.write("a", first_row=3, num_rows=2)
    ledger.ignore("y", "not needed")
    ledger.settle()
    assert ledger.num_used == 1


@pytest.mark.parametrize(
    ("first_row", "num_rows", "message"),
    [
        (3, 1, "rows 4..4 of 5 were never written"),
        (4, 1, "rows 3..3 of 5 were never written"),
        (2, 3, "rows 2..2 of 5 were written twice"),
        (3, 3, "rows 5..5 of 5 were written twice"),
    ],
)
def test_rows_written_twice_or_never(first_row: int, num_rows: int, message: str) -> None:
    ledger = make_ledger()
    ledger.write("a", first_row=first_row, num_rows=num_rows)
    ledger.ignore("y", "not needed")
    with pytest.raises(CheckpointError, match=message):
        ledger.settle()


def test_a_parameter_never_written() -> None:
    with pytest.raises(CheckpointError, match=r"parameter b: rows 0\.\.6 of 7 were never written"):
        Ledger(parameter_rows={"b": 7}, tensors=[]).settle()


def test_a_tensor_neither_used_nor_ignored() -> None:
    ledger = make_ledger()
    ledger.write("a", first_row=3, num_rows=2)
    with pytest.raises(CheckpointError, match="tensor y and 0 more were neither used nor ignored"):
        ledger.settle()


def test_a_tensor_used_and_ignored_or_unknown() -> None:
    ledger = make_ledger()
    ledger.write("a", first_row=3, num_rows=2)
    ledger.use("y")
    ledger.ignore("y", "not needed")
    with pytest.raises(CheckpointError, match="tensor y was used and ignored"):
        ledger.settle()
    ledger = make_ledger()
    ledger.write("a", first_row=3, num_rows=2)
    ledger.use("z")
    with pytest.raises(CheckpointError, match="tensor z was accounted for, but no file holds it"):
        ledger.settle()
