"""The checkpoint with real dimensions on disk, 25 GB, for as long as a test module runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def real_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write it with a GPU; its files go at the end, where pytest keeps folders of earlier runs."""
    from benchmarks.real_checkpoint import write_checkpoint  # noqa: PLC0415

    path = tmp_path_factory.mktemp("real")
    write_checkpoint(path, device="cuda")
    yield path
    for file in path.iterdir():
        file.unlink()
