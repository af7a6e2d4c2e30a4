"""Runs checks of Triton kernels in processes of their own: whether kernels are interpreted is decided at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(code: str, directory: Path) -> None:
    """Run code whose kernels are interpreted, on a machine without a GPU."""
    _run(code, directory, TRITON_INTERPRET="1")


def run_compiling(code: str, directory: Path) -> None:
    """Run code that compiles kernels."""
    _run(code, directory, TRITON_CACHE_DIR=str(directory))


def _run(code: str, directory: Path, **environment: str) -> None:
    pytest.importorskip("triton")
    check = directory / "check.py"
    check.write_text(code)
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outcome = subprocess.run(
        [sys.executable, str(check)], env=inherited | environment, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
