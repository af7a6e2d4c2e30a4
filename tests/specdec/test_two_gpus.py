"""Two ranks on a GPU each say what one says, however they exchange: a checkpoint with GLM-5.2's real dimensions.

Rounds are CUDA graphs that hold the ranks' exchanges. With and without drafts, over peer memory and by NCCL, texts are
the same bits; between geometries sums are added in another order.
"""

import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.dcp.communicator import ProcessCommunicator
from specdec.dcp.peer_communicator import PeerCommunicator
from specdec.engine import Engine
from specdec.errors import RankLostError
from specdec.sampling.sampling_params import SamplingParams
from tests.support.gpu import needs_two_gpus
from tests.support.processes import await_end, children_of
from tests.support.real_directory import real_directory

pytestmark = [
    pytest.mark.full,  # 25 GB of disk
    pytest.mark.xdist_group("two GPUs"),
    needs_two_gpus,
]

LENGTHS = (2500, 130, 63, 1)  # more than the indexer chooses, pages on both ranks, one token below a page
NUM_DRAFT_TOKENS = 5
PARAMS = [
    SamplingParams(max_tokens=32, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
    for index in range(len(LENGTHS))
]
TIMEOUT_S = 6.0
LONG_S = 60.0  # far above anything that ends


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with real_directory(tmp_path_factory) as path:
        yield path
    said.cache_clear()


def start(directory: Path, *, dcp_size: int, num_draft_tokens: int = NUM_DRAFT_TOKENS, **settings: Any) -> Engine:
    return Engine.from_pretrained(
        directory, dtype="bfloat16", device="cuda", tp_size=2, dcp_size=dcp_size, num_draft_tokens=num_draft_tokens,
        max_model_len=4096, max_num_requests=len(LENGTHS), num_pages=256, **settings,
    )  # fmt: skip


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 150_000, (length,), generator=generator).tolist() for length in LENGTHS]


@functools.cache
def said(
    directory: Path, dcp_size: int, num_draft_tokens: int, peer_memory: bool
) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """What an engine generates, and its logits of a prompt."""
    settings = {"dcp_size": dcp_size, "num_draft_tokens": num_draft_tokens, "peer_memory": peer_memory}
    with start(directory, **settings) as engine:
        worker = engine.core.ranks.worker
        groups = [worker.groups.tp, worker.groups.dcp][:dcp_size]
        assert all(isinstance(each, PeerCommunicator if peer_memory else ProcessCommunicator) for each in groups)
        assert "kernels: hopper" in engine.report_lines()
        assert worker.device_rounds is not None
        results = engine.generate(prompts(), PARAMS)
        if num_draft_tokens:
            assert engine.core.slots.speculation().num_accepted_tokens > 0
        logits_TV = engine.score(prompts()[1], with_logits=True).logits_TV
    return [result.choices[0].token_ids for result in results], logits_TV


@pytest.mark.parametrize("dcp_size", [1, 2])
def test_drafts_and_graphs_change_nothing(directory: Path, dcp_size: int) -> None:
    assert said(directory, dcp_size, NUM_DRAFT_TOKENS, True)[0] == said(directory, dcp_size, 0, True)[0]


@pytest.mark.parametrize("dcp_size", [1, 2])
def test_peer_memory_gives_the_bits_of_nccl(directory: Path, dcp_size: int) -> None:
    ours, theirs = (said(directory, dcp_size, NUM_DRAFT_TOKENS, peer_memory) for peer_memory in (True, False))
    assert ours[0] == theirs[0]
    assert np.array_equal(ours[1], theirs[1])


def test_shared_pages_change_no_more_than_the_rounding_of_what_is_merged(directory: Path) -> None:
    (texts, alone_TV), (shared_texts, shared_TV) = (
        said(directory, dcp_size, NUM_DRAFT_TOKENS, True) for dcp_size in (1, 2)
    )
    error_T = np.linalg.norm(shared_TV - alone_TV, axis=1) / np.linalg.norm(alone_TV, axis=1)
    assert not error_T[:64].any(), "one rank has the first page"
    assert 0 < float(np.median(error_T[64:])) < 0.05
    same = sum(mine[0] == theirs[0] for mine, theirs in zip(texts, shared_texts, strict=True))
    assert same >= len(LENGTHS) - 1, "a choice may be as narrow as that"


@pytest.mark.parametrize(
    ("number", "cause", "most_s"),
    [(signal.SIGKILL, "was killed by signal SIGKILL", 5.0), (signal.SIGSTOP, "no sign of life", 2 * TIMEOUT_S)],
)
def test_a_rank_that_is_lost_in_a_round_ends_the_engine_in_order(
    directory: Path, number: signal.Signals, cause: str, most_s: float
) -> None:
    before = children_of(os.getpid())
    with start(directory, dcp_size=2, rank_timeout_s=TIMEOUT_S) as engine:
        followers = children_of(os.getpid()) - before
        assert len(followers) == 1
        endless = SamplingParams(max_tokens=3500, temperature=0.0, ignore_eos=True)
        stream = engine.stream(prompts()[1], endless)
        for _ in range(3):
            next(stream)
        for pid in followers:
            os.kill(pid, number)
        began = time.monotonic()
        with pytest.raises(RankLostError, match=f"rank 1 is gone: .*{cause}"):
            stream.result()
        assert time.monotonic() - began < most_s
        with pytest.raises(RankLostError):
            engine.generate(prompts()[1], endless)
    assert time.monotonic() - began < LONG_S
    assert await_end(followers, timeout_s=LONG_S) == set()
    torch.zeros(1, device="cuda:0").add_(1).cpu()  # this process goes on
