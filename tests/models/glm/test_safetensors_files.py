"""Bytes of stored tensors are read as they lie, and a file that changes meanwhile is an error that names it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec.kernels.errors import CheckpointError
from specdec.models.glm.safetensors_files import OpenFiles, StoredTensor, read_header


@pytest.fixture
def stored(tmp_path: Path) -> StoredTensor:
    """Values 0, 1, ... 99 between two other tensors."""
    others = {"a": torch.zeros(7), "c": torch.zeros(5)}
    save_file(others | {"b": torch.arange(100, dtype=torch.float32)}, tmp_path / "model.safetensors")
    return next(tensor for tensor in read_header(tmp_path / "model.safetensors") if tensor.name == "b")


@pytest.mark.parametrize(("first", "number"), [(0, 100), (0, 1), (37, 20), (99, 1), (50, 0)])
def test_a_range_is_what_was_stored(stored: StoredTensor, first: int, number: int) -> None:
    out = torch.full((number,), torch.nan)
    with OpenFiles([stored.file]) as files:
        files.read(stored, out.view(torch.uint8), first_byte=4 * first)
    assert torch.equal(out, torch.arange(first, first + number, dtype=torch.float32))


def test_a_file_that_shrinks_while_it_is_read(stored: StoredTensor) -> None:
    with OpenFiles([stored.file]) as files:
        content = stored.file.read_bytes()
        stored.file.write_bytes(content[: stored.offset + 150])
        with pytest.raises(CheckpointError, match=r"ended at byte \d+, inside of b, while it was read") as error:
            files.read(stored, torch.empty(400, dtype=torch.uint8))
    assert str(stored.file) in str(error.value)
    assert f"byte {stored.offset + 150}" in str(error.value)


def test_a_file_that_cannot_be_read(stored: StoredTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with OpenFiles([stored.file]) as files:
        monkeypatch.setattr("os.preadv", fail)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read at b \(Input/output error\)"):
            files.read(stored, torch.empty(400, dtype=torch.uint8))
