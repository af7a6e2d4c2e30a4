"""A checkpoint with GLM-5.2's real dimensions runs whole and as eight slices on one GPU, and says the same."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.device.device_rounds import DeviceRounds
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.parameters import TensorParallel
from specdec.sampling.sampling_params import SamplingParams
from tests.support.real_directory import real_directory
from tests.support.thread_engine import ThreadEngine

pytestmark = [
    pytest.mark.full,  # 25 GB of disk
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are Hopper's"),
]

SETTINGS = {"max_model_len": 4096, "max_num_requests": 4, "num_pages": 256}
LENGTHS = (2500, 63, 1)
PIECE = 4  # tokens after which eight slices are told again what the whole said
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with real_directory(tmp_path_factory) as path:
        yield path


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 150_000, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def whole(directory: Path) -> list[tuple[int, ...]]:
    """What the whole model says, drafting five tokens a round."""
    settings = {**SETTINGS, "num_draft_tokens": 5}
    with Engine.from_pretrained(directory, dtype="bfloat16", device="cuda:0", **settings) as engine:
        assert "kernels: hopper" in engine.report_lines()
        results = engine.generate(prompts(), GREEDY)
        assert engine.core.slots.speculation().num_accepted_tokens > 0
    return [result.choices[0].token_ids for result in results]


def test_drafts_and_graphs_change_nothing(directory: Path, whole: list[tuple[int, ...]]) -> None:
    with Engine.from_pretrained(directory, dtype="bfloat16", device="cuda:0", num_draft_tokens=0, **SETTINGS) as engine:
        assert [result.choices[0].token_ids for result in engine.generate(prompts(), GREEDY)] == whole


def test_eight_slices_say_what_the_whole_says(
    directory: Path, whole: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceRounds, "capture", lambda _rounds: None)  # threads meet between launches
    shares = [
        load_checkpoint(
            directory,
            dtype=torch.bfloat16,
            device="cuda:0",
            tensor_parallel=TensorParallel(rank=rank, size=8),
            keep_fp8=True,
        )
        for rank in range(8)
    ]
    assert shares[0].parameters["layers.0.attention.qkv_a_proj.scale"].shape == (2624 // 64, 6144 // 128)
    running = ThreadEngine(shares, EngineConfig(num_draft_tokens=3, tp_size=8, **SETTINGS), with_draft=True)
    try:
        pieces = [
            (prompt + list(row[:begin]), row[begin : begin + PIECE])
            for prompt, row in zip(prompts(), whole, strict=True)
            for begin in range(0, len(row), PIECE)
        ]
        params = replace(GREEDY, max_tokens=PIECE)
        results = running.engine().generate([prompt for prompt, _ in pieces], params)
        assert running.channel.sent.count("decode") > 0
    finally:
        running.close()
    said = [result.choices[0].token_ids for result in results]
    # Sums over ranks round otherwise than sums over a whole row: a token that is nearly as good may be taken, and then
    # the rest of its piece is another text.
    same = sum(
        mine == theirs
        for row, (_, other) in zip(said, pieces, strict=True)
        for mine, theirs in zip(row, other, strict=True)
    )
    assert same >= 0.8 * sum(map(len, whole)), (said, whole)
