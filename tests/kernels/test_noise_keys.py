"""Noise keys of rows are those that the host computes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.kernels.gumbel_noise import NoiseStream, position_keys, stream_key
from specdec.kernels.noise_keys import noise_keys, noise_keys_ref
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

KERNEL_CHECK = """
import torch
from specdec.kernels.noise_keys import noise_keys, noise_keys_ref

for requests, rows, first in ((1, 1, 0), (5, 6, 0), (40, 1, 4), (3, 129, 2)):
    stream_key = torch.randint(-(1 << 63), (1 << 63) - 1, (requests,))
    start = torch.randint(0, 1 << 20, (requests,))
    out = torch.zeros(requests * rows, dtype=torch.int64)
    noise_keys(stream_key, start, first=first, out_T=out)
    assert torch.equal(out, noise_keys_ref(stream_key, start, rows_per_request=rows, first=first))
"""


def test_the_definition_gives_the_keys_of_plain_decoding() -> None:
    key = np.array([stream_key(seed=7, choice=0, stream=NoiseStream.TARGET)], dtype=np.uint64)
    keys_T = noise_keys_ref(torch.from_numpy(key.view(np.int64)), torch.tensor([9]), rows_per_request=3, first=0)
    plain = [position_keys(key, np.array([position]))[0] for position in (10, 11, 12)]
    assert keys_T.tolist() == plain


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*i64", "*i64", "*i64", "i32", "i32", "i32")
    sizes = {"GOLDEN": -1, "MIX_1": -3, "MIX_2": -5, "BLOCK": 128, "STARTS_EARLY": True}
    assert ptx_for_hopper("noise_keys.noise_keys_kernel", tmp_path, types=types, constants=sizes)


def test_rows_that_no_request_has_are_refused() -> None:
    start_B = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="got 3 and 2"):
        noise_keys(start_B, start_B, out_T=torch.zeros(3, dtype=torch.int64))


@needs_gpu
def test_a_gpu_gives_what_the_definition_gives() -> None:
    stream_key_B = torch.randint(-(1 << 63), (1 << 63) - 1, (32,), device="cuda")
    start_B = torch.randint(0, 1 << 20, (32,), device="cuda")
    out_T = torch.zeros(192, dtype=torch.int64, device="cuda")
    noise_keys(stream_key_B, start_B, first=1, out_T=out_T)
    assert torch.equal(out_T, noise_keys_ref(stream_key_B, start_B, rows_per_request=6, first=1))
