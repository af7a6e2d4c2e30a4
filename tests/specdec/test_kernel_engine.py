"""An engine that runs on the kernels says what plain decoding says, on a CPU with definitions in their place."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from specdec.dcp.layout import EntryKind, KvFormat
from specdec.dcp.pool import KvPool
from specdec.device.decode_round import DecodeRound
from specdec.device.decode_task import DecodeTask
from specdec.device.device_rounds import DeviceRounds
from specdec.device.started_round import StartedRound
from specdec.drafting.mtp_draft import MtpDraft
from specdec.drafting.scripted_draft import ScriptedDraft
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError, RoundError
from specdec.kernel_set import KernelSet
from specdec.memory.pools import Pools
from specdec.models.glm import kernel_target
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.kernel_target import KernelMtp, KernelTarget
from specdec.models.glm.parameters import TensorParallel
from specdec.ranks import layer_parts, rank_setup
from specdec.ranks.kernel_choice import KernelChoice
from specdec.ranks.passes import Ranks
from specdec.ranks.rank_transfer import RankTransfer
from specdec.ranks.worker import Worker
from specdec.request import Request
from specdec.result import BatchError, GenerationResult
from specdec.sampling.sampling_params import SamplingParams
from specdec.scheduler import Scheduler
from tests.support.engines import write_engine_checkpoint
from tests.support.handoff import serving
from tests.support.kernel_definitions import use_definitions
from tests.support.thread_engine import ThreadEngine
from tests.support.tiny_checkpoint import tiny_spec

SPEC = tiny_spec(
    "real_dims", weights="fp8", hidden_size=512, q_lora_rank=512, intermediate_size=512, moe_intermediate_size=256,
    num_layers=2, num_heads=4, num_experts=4, index_topk=64, vocab_size=128, indexer_types=("full", "shared"),
)  # fmt: skip
GENERATOR = torch.Generator().manual_seed(5)
# A chunk of several passes, one token below a page, a few tokens.
PROMPTS = [torch.randint(0, SPEC.first_special_id, (n,), generator=GENERATOR).tolist() for n in (200, 63, 5)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine_checkpoint(tmp_path_factory.mktemp("kernels"), SPEC)


@pytest.fixture
def on_kernels(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_definitions(monkeypatch, GlmConfig.from_file(path / "config.json"))
    choice = KernelChoice(kernels=KernelSet.HOPPER)
    monkeypatch.setattr(rank_setup, "choose_kernels", lambda *_args, **_settings: choice)
    with torch.no_grad():
        yield


def engine(path: Path, num_draft_tokens: int) -> Engine:
    return Engine.from_pretrained(
        path, dtype="bfloat16", num_draft_tokens=num_draft_tokens, max_model_len=256, max_num_requests=3,
        prefill_chunk_tokens=256,
    )  # fmt: skip


def generated(path: Path, num_draft_tokens: int, params: list[SamplingParams]) -> list[GenerationResult]:
    with engine(path, num_draft_tokens) as running:
        return running.generate(PROMPTS, params)


@pytest.mark.usefixtures("on_kernels")
def test_drafts_change_nothing(path: Path) -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.8, seed=1, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
    ]
    plain, drafted = generated(path, 0, params), generated(path, 3, params)
    for mine, theirs in zip(plain, drafted, strict=True):
        assert mine.choices[0].token_ids == theirs.choices[0].token_ids
    assert sum(each.choices[0].speculation.num_accepted_tokens for each in drafted) > 0


@pytest.mark.usefixtures("on_kernels")
def test_the_cache_is_packed_and_a_second_prompt_reuses_it(path: Path) -> None:
    with engine(path, 3) as running:
        worker = running.core.ranks.worker
        assert isinstance(worker.target, KernelTarget)
        assert worker.pool.layout.kv_format is KvFormat.FP8_PACKED
        assert "kernels: hopper" in running.report_lines()
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        first, second = (running.generate([PROMPTS[0]], params)[0] for _ in range(2))
        assert first.choices[0].token_ids == second.choices[0].token_ids
        assert second.usage.num_cached_tokens == 192
        with pytest.raises(ConfigError, match="only torch traces"):
            running.trace(PROMPTS[2])


@pytest.mark.usefixtures("on_kernels")
def test_prompts_of_a_prefill_decode_as_if_computed_here(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers go one by one, once the last of several passes has stored them; rounds on the device run meanwhile."""
    monkeypatch.setattr(layer_parts, "PART_BYTES", 1)
    params = [SamplingParams(max_tokens=12, temperature=0.4 * n, seed=n, ignore_eos=True) for n in range(len(PROMPTS))]
    expected = [result.choices[0].token_ids for result in generated(path, 3, params)]
    stored: list[int] = []
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "max_num_requests": 3, "transport": "local"}
    with Engine.from_pretrained(
        path, num_draft_tokens=0, draft_kv=True, prefill_chunk_tokens=256, **settings
    ) as prefill:
        transfer = prefill.core.ranks.worker.transfer
        assert transfer is not None
        post = transfer.post_stored

        def post_stored(layer: int) -> None:
            stored.append(layer)
            post(layer)

        monkeypatch.setattr(transfer, "post_stored", post_stored)
        with (
            serving(prefill) as server,
            Engine.from_pretrained(path, num_draft_tokens=3, prefill=[server.address], **settings) as decode,
        ):
            assert decode.core.ranks.worker.device_rounds is not None
            results = decode.generate(PROMPTS, params)
            assert decode.intake is not None
            assert decode.intake.counts.num_received == len(PROMPTS)
            assert decode.kv_pages()[0] == decode.kv_pages()[1]
    assert [result.choices[0].token_ids for result in results] == expected
    in_passes = [layer for layer in stored if layer < SPEC.num_layers]
    assert in_passes
    assert in_passes == [0, 1] * (len(in_passes) // 2), "each layer once, however many parts a pass has"


def test_what_the_kernels_say_is_what_torch_says(path: Path, on_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)] * 3
    ours = generated(path, 0, params)
    monkeypatch.undo()
    plain = generated(path, 0, params)
    for mine, theirs in zip(ours, plain, strict=True):
        tops = [dict(result.choices[0].logprobs[0].top) for result in (mine, theirs)]
        both = [(tops[0][token_id], value) for token_id, value in tops[1].items() if token_id in tops[0]]
        assert len(both) >= 3
        for ours_value, torch_value in both:
            assert abs(ours_value - torch_value) < 0.3  # bfloat16 there, FP8 cache and index here


SHORT = [PROMPTS[1][:n] for n in (60, 9, 30, 50, 3)]  # rows over a page's border, more requests than slots
DRAWN = [
    SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=list(range(0, 60)), ignore_eos=True),
    SamplingParams(max_tokens=18, temperature=0.6, seed=4, ignore_eos=True),
    SamplingParams(max_tokens=11, temperature=0.0, ignore_eos=True),
]


def decoded(path: Path, num_draft_tokens: int, **settings: Any) -> tuple[list[tuple[int, ...]], Engine]:
    running = Engine.from_pretrained(
        path, dtype="bfloat16", num_draft_tokens=num_draft_tokens, max_model_len=128, max_num_requests=3, **settings
    )
    with running:
        return [result.choices[0].token_ids for result in running.generate(SHORT, DRAWN)], running


@pytest.mark.usefixtures("on_kernels")
def test_rounds_on_the_device_say_what_passes_say(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rounds: Counter[int] = Counter()
    start = DeviceRounds.start

    def counted(rounds: DeviceRounds, task: DecodeTask) -> StartedRound:
        started = start(rounds, task)
        num_rounds[started.num_requests] += 1
        return started

    monkeypatch.setattr(DeviceRounds, "start", counted)
    on_device, running = decoded(path, 3)
    assert set(num_rounds) == {1, 2, 3}, "requests came and went"
    assert running.core.slots.speculation().num_accepted_tokens > 0
    assert running.core.scheduler.allocator.num_free + running.core.scheduler.prefix_tree.num_pages == (
        running.core.scheduler.allocator.num_pages
    )
    assert decoded(path, 0)[0] == on_device
    num_rounds.clear()
    monkeypatch.setattr(rank_setup, "_decodes_on_device", lambda *_args, **_settings: False)
    assert decoded(path, 3)[0] == on_device
    assert not num_rounds


@pytest.mark.usefixtures("on_kernels")
def test_a_request_whose_pages_were_taken_away_goes_on_as_before(path: Path) -> None:
    prompts, params = [PROMPTS[1][:60], PROMPTS[1][1:59]], [DRAWN[0], DRAWN[3]]  # both grow over a page's border
    results = []
    for num_pages in (4, 3):
        settings = {"max_model_len": 128, "max_num_requests": 3, "num_pages": num_pages, "prefix_cache": False}
        with Engine.from_pretrained(path, dtype="bfloat16", num_draft_tokens=3, **settings) as running:
            results.append([result.choices[0].token_ids for result in running.generate(prompts, params)])
            assert (running.core.scheduler.num_preemptions > 0) == (num_pages == 3)
    assert results[0] == results[1]


@pytest.mark.usefixtures("on_kernels")
def test_another_draft_source_is_asked_and_noise_on_the_logits_is_added(path: Path) -> None:
    """Rounds on the device would know of neither."""
    plain, _ = decoded(path, 0)
    asked: list[int] = []

    def script(request: Request) -> Sequence[int]:
        asked.append(request.choice_index)
        return plain[[list(prompt) for prompt in SHORT].index(request.prompt_ids.tolist())]

    source = ScriptedDraft(script, vocab_size=SPEC.vocab_size)
    drafted, running = decoded(path, 3, draft_source=source, draft_kv=True)
    assert drafted == plain
    assert asked
    assert running.core.slots.speculation().num_accepted_tokens == running.core.slots.speculation().num_draft_tokens
    noisy, running = decoded(path, 3, logits_noise=0.5)
    assert running.core.ranks.worker.device_rounds is None
    assert noisy != plain


@pytest.mark.usefixtures("on_kernels")
def test_other_memory_is_taken_once_the_old_is_free_and_serves_as_well(path: Path) -> None:
    running = Engine.from_pretrained(path, dtype="bfloat16", num_draft_tokens=3, max_model_len=128, max_num_requests=3)
    with running, torch.inference_mode():
        said = [running.generate(SHORT[0], DRAWN[0])[0].choices[0].token_ids]
        worker = running.core.ranks.worker
        assert isinstance(worker.draft, MtpDraft)
        pools = [pool for pool in (worker.pool, worker.draft.pool) if isinstance(pool, KvPool)]
        old = [StorageWeakRef(pool.memory(kind).untyped_storage()) for pool in pools for kind in EntryKind]

        def reopen(_pools: Pools) -> None:
            for pool in pools:
                pool.take_memory(None)
                for kind in EntryKind:
                    pool.buffer(kind).fill_(0xFF)
            assert all(storage.expired() for storage in old)

        worker.transfer = cast("RankTransfer", SimpleNamespace(reopen=reopen, address=bytes, close=lambda: None))
        running.core.scheduler.drop_cached_prefixes()
        running.core.ranks.reopen()
        said.append(running.generate(SHORT[0], DRAWN[0])[0].choices[0].token_ids)
    assert said[0] == said[1]


@pytest.mark.usefixtures("on_kernels")
def test_graphs_are_made_with_all_ranks_once_each_has_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loads for longer than a collective may wait must keep nobody waiting in one."""
    path = write_engine_checkpoint(tmp_path / "wide", replace(SPEC, intermediate_size=1024))
    captured: list[int] = []
    monkeypatch.setattr(Worker, "_capture", lambda worker: captured.append(worker.groups.tp.rank))
    each = [TensorParallel(rank=rank, size=2) for rank in range(2)]
    shares = [load_checkpoint(path, dtype=torch.bfloat16, tensor_parallel=share, keep_fp8=True) for share in each]
    running = ThreadEngine(shares, EngineConfig(max_model_len=128, tp_size=2), with_draft=True)
    try:
        assert not captured
        running.engine()
    finally:
        running.close()
    assert sorted(captured) == [0, 1]


@pytest.mark.usefixtures("on_kernels")
def test_warming_up_leaves_no_trace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_target, "MAX_GROUPS", 2)
    expected, _ = decoded(path, 3)
    with Engine.from_pretrained(
        path, dtype="bfloat16", num_draft_tokens=3, max_model_len=128, max_num_requests=3
    ) as running:
        worker = running.core.ranks.worker
        assert isinstance(worker.draft, MtpDraft)
        pools = [pool for pool in (worker.pool, worker.draft.pool) if isinstance(pool, KvPool)]
        memories = [pool.buffer(entry.kind) for pool in pools for entry in pool.layout.entries]
        for memory in memories:
            memory.fill_(0xFF)
        for model, pool in zip((worker.target, worker.draft.mtp), pools, strict=True):
            assert isinstance(model, KernelTarget | KernelMtp)
            with torch.inference_mode():
                model.warm_up(pool)
        assert len(memories) == 4
        assert all(bool((memory == 0xFF).all()) for memory in memories)
        assert [result.choices[0].token_ids for result in running.generate(SHORT, DRAWN)] == expected


@pytest.mark.usefixtures("on_kernels")
def test_a_round_on_the_device_that_fails_ends_its_requests_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = decoded(path, 3)
    launch = DecodeRound.launch
    faults = iter([RuntimeError("a launch failed")])

    def failing(decode_round: DecodeRound) -> None:
        launch(decode_round)
        for fault in faults:
            raise fault

    monkeypatch.setattr(DecodeRound, "launch", failing)
    running = Engine.from_pretrained(path, dtype="bfloat16", num_draft_tokens=3, max_model_len=128, max_num_requests=3)
    with running, pytest.raises(BatchError) as failed:
        running.generate(SHORT, DRAWN)
    texts = [None if result is None else result.choices[0].token_ids for result in failed.value.results]
    # The third had ended with its first token, and the fourth's prompt was part of the round.
    assert texts == [None, None, expected[2], None, expected[4]]
    assert len(expected[2]) == 1


@pytest.mark.usefixtures("on_kernels")
def test_logits_that_are_not_finite_fail_a_request_on_the_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = DecodeRound.commit

    def broken(decode_round: DecodeRound, hidden_TH: torch.Tensor) -> None:
        hidden_TH[:4] = torch.nan  # of place 0
        commit(decode_round, hidden_TH)

    monkeypatch.setattr(DecodeRound, "commit", broken)
    running = Engine.from_pretrained(path, dtype="bfloat16", num_draft_tokens=3, max_model_len=128, max_num_requests=3)
    with running, pytest.raises(RoundError, match="logits are not finite"):
        running.generate(SHORT[:1], DRAWN[:1])


@pytest.mark.usefixtures("on_kernels")
def test_two_ranks_say_the_same_with_and_without_drafts_and_shared_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_target, "MAX_GROUPS", 2)

    def warm_up(worker: Worker) -> None:
        assert isinstance(worker.target, KernelTarget)
        with torch.inference_mode():
            worker.target.warm_up(worker.pool)

    path = write_engine_checkpoint(tmp_path / "wide", replace(SPEC, intermediate_size=1024))
    shares = [TensorParallel(rank=rank, size=2) for rank in range(2)]
    prompts, params = [PROMPTS[0][:100], SHORT[0]], DRAWN[:2]  # pages on both ranks, and one more while they decode
    logits = {}
    for dcp_size in (1, 2):
        said = []
        for num_draft_tokens in (0, 3):
            config = EngineConfig(
                num_draft_tokens=num_draft_tokens, max_model_len=192, max_num_requests=3, tp_size=2, dcp_size=dcp_size
            )
            running = ThreadEngine(
                [load_checkpoint(path, dtype=torch.bfloat16, tensor_parallel=share, keep_fp8=True) for share in shares],
                config,
                with_draft=num_draft_tokens > 0,
            )
            try:
                assert all(worker.device_rounds is not None for worker in running.workers)
                engine = running.engine()
                with ThreadPoolExecutor(2) as ranks:
                    list(ranks.map(warm_up, running.workers))
                said.append([each.choices[0].token_ids for each in engine.generate(prompts, params)])
                assert running.channel.sent.count("decode") > 0
                if not num_draft_tokens:
                    logits[dcp_size] = torch.from_numpy(engine.score(PROMPTS[0][:140], with_logits=True).logits_TV)
            finally:
                running.close()
        assert said[0] == said[1]
    error_T = (logits[2] - logits[1]).norm(dim=1) / logits[1].norm(dim=1)
    assert bool((error_T[:64] == 0).all())  # one rank holds all
    assert 0 < float(error_T[64:].max()) < 0.02  # parts are merged that were rounded to bfloat16


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to rounds on the device, in order."""
    seen: list[str] = []
    for holder, name in (
        (DeviceRounds, "start"),
        (Ranks, "await_decoded"),
        (Scheduler, "schedule"),
        (Scheduler, "finish"),
    ):
        method = getattr(holder, name)

        def noted(*arguments: Any, method: Any = method, name: str = name, **named: Any) -> Any:
            seen.append(name)
            return method(*arguments, **named)

        monkeypatch.setattr(holder, name, noted)
    return seen


@pytest.mark.usefixtures("on_kernels")
def test_a_round_is_read_while_the_next_one_runs(path: Path, events: list[str]) -> None:
    with engine(path, 3) as running:
        running.generate([SHORT[4]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    first = events.index("start")
    assert events[first : first + 6] == ["start", "start", "await_decoded", "schedule", "start", "await_decoded"]
    num_running = np.cumsum([{"start": 1, "await_decoded": -1}.get(event, 0) for event in events])
    assert num_running.max() == 2
    assert 0 <= num_running[-1] <= 1, "one at most was started for nothing"


@pytest.mark.usefixtures("on_kernels")
def test_a_round_goes_on_without_a_request_that_left(path: Path, events: list[str]) -> None:
    params = SamplingParams(max_tokens=14, temperature=1.0, seed=2, ignore_eos=True)
    plain = generated(path, 0, [params] * 3)[2].choices[0].token_ids
    stop_id = next(token_id for place, token_id in enumerate(plain) if place > 3 and token_id not in plain[:place])
    stops = replace(params, stop_token_ids=(stop_id,))
    goes_on = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    events.clear()
    with engine(path, 0) as running:
        stopped, _ = running.generate([PROMPTS[2], PROMPTS[1]], [stops, goes_on])
    assert stopped.choices[0].finish_reason == "stop"
    left = events.index("finish")
    assert events[left - 3 : left] == ["schedule", "start", "await_decoded"], (
        "the next round was started before it ended"
    )
    assert events[left + 1 : left + 4] == ["schedule", "await_decoded", "schedule"], "of the other it is read"
