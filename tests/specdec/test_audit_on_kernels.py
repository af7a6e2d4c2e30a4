"""An audit of ranks whose rounds stay on the device, on a CPU with definitions in the kernels' place."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.audit import AuditedRun, audit
from specdec.device.decode_round import DecodeRound
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.parameters import TensorParallel
from specdec.ranks.decoded_record import DecodedRecord
from specdec.sampling.sampling_params import SamplingParams
from specdec.slot_table import Int64Array
from tests.specdec.test_kernel_engine import PROMPTS, SPEC
from tests.support.engines import write_engine_checkpoint
from tests.support.kernel_definitions import use_definitions
from tests.support.thread_engine import ThreadEngine

PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
Change = Callable[[ThreadEngine], object]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine_checkpoint(tmp_path_factory.mktemp("wide"), replace(SPEC, intermediate_size=1024))


@pytest.fixture
def stack(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    use_definitions(monkeypatch, GlmConfig.from_file(path / "config.json"))
    with torch.no_grad(), ExitStack() as stack:
        yield stack


def run(
    stack: ExitStack, path: Path, *, num_draft_tokens: int, change: Change = lambda _running: None
) -> list[AuditedRun]:
    """Audit engines of thread ranks; `change` may break the ones with more than one rank."""

    def start(**settings: Any) -> Engine:
        config = EngineConfig(max_model_len=192, max_num_requests=3, **settings)
        each = [TensorParallel(rank=rank, size=config.tp_size) for rank in range(config.tp_size)]
        shares = [load_checkpoint(path, dtype=torch.bfloat16, tensor_parallel=share, keep_fp8=True) for share in each]
        running = ThreadEngine(shares, config, with_draft=config.num_draft_tokens > 0)
        stack.callback(running.close)
        if config.tp_size > 1:
            change(running)
        return running.engine()

    settings = {"tp_size": 2, "dcp_size": 2, "num_draft_tokens": num_draft_tokens}
    return audit(start, [PROMPTS[0][:100], PROMPTS[2]], PARAMS, settings=settings)


def test_ranks_that_draw_alike_are_consistent_and_what_kernels_do_not_give_is_left_out(
    stack: ExitStack, path: Path
) -> None:
    for each in run(stack, path, num_draft_tokens=3):
        assert each.is_consistent, each
        assert each.num_selections is None
        assert each.changed_by_drafts == ()
        assert each.on_device is not None
        assert each.on_device.num_rounds > 2
        assert each.on_device.disagreements_per_rank == (0,) * each.tp_size
        assert each.on_device.num_decisions > each.on_device.num_rounds
        assert each.num_decisions > 0, "the same prompts ran in passes"
        assert each.max_row_error < 0.1
        for difference in each.differences:
            assert difference.gap < difference.limit


def test_a_rank_that_draws_otherwise_on_the_device_is_noticed(
    stack: ExitStack, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[DecodedRecord] = []
    take = DecodedRecord.take

    def take_other(record: DecodedRecord) -> list[Int64Array]:
        rounds = take(record)
        if rounds and any(record is each for each in changed):
            rounds[1][0] += 1
        return rounds

    monkeypatch.setattr(DecodedRecord, "take", take_other)
    runs = run(stack, path, num_draft_tokens=0, change=lambda running: changed.append(running.workers[1]._decoded))
    disagreements = [each.on_device.disagreements_per_rank for each in runs if each.on_device is not None]
    assert disagreements == [(0,), (0, 1)]
    assert [each.is_consistent for each in runs] == [True, False]


def test_rounds_that_draw_what_passes_do_not_are_noticed(
    stack: ExitStack, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = DecodeRound.commit
    monkeypatch.setattr(DecodeRound, "commit", lambda rounds, hidden_TH: commit(rounds, -hidden_TH))
    for each in run(stack, path, num_draft_tokens=0):
        assert each.on_device is not None
        assert each.on_device.other_texts
        assert not any(each.on_device.disagreements_per_rank)
        assert not each.is_consistent
