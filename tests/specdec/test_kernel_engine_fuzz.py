"""Seeded scenarios of an engine that runs on the kernels: whatever comes and goes, a request says what it says alone.

Definitions stand in the place of the kernels, as in `test_kernel_engine.py`. A scenario's clock moves by the round, so
that a seed is the same scenario everywhere.
"""

import functools
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec import core as core_module
from specdec import engine as engine_module
from specdec import scheduler as scheduler_module
from specdec.core import Decision, EngineCore
from specdec.device.decode_round import DecodeRound, RoundSizes
from specdec.device.decode_task import Decoded
from specdec.device.started_round import StartedRound
from specdec.device_decoding import DeviceDecoding
from specdec.engine import Engine, Submission
from specdec.engine_config import EngineConfig
from specdec.errors import DeadlineError, RoundError
from specdec.kernel_set import KernelSet
from specdec.kernels.block_fp8_linear import BlockFp8Linear
from specdec.kernels.latent_formats import decode_fp8_packed
from specdec.kernels.latent_rows import LATENT_DIM, ROPE_DIM
from specdec.kernels.packed_sparse_mla import ROW_BYTES, WrittenLast
from specdec.models.glm import layer_launches
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.layer_launches import LayerLaunches
from specdec.models.glm.parameters import TensorParallel
from specdec.ranks import rank_setup
from specdec.ranks.kernel_choice import KernelChoice
from specdec.request import Request
from specdec.result import StreamDelta
from specdec.sampling.sampling_params import SamplingParams
from specdec.scheduler import ScheduledBatch
from specdec.text.tokenizer import Tokenizer
from tests.support import kernel_definitions
from tests.support.engines import write_engine_checkpoint
from tests.support.kernel_definitions import use_definitions
from tests.support.thread_engine import ThreadEngine
from tests.support.tiny_checkpoint import TinySpec, read_tensors, tiny_spec, write_shards

SPEC = tiny_spec(
    "real_dims", weights="fp8", hidden_size=512, q_lora_rank=512, intermediate_size=512, moe_intermediate_size=256,
    num_layers=2, num_heads=4, num_experts=2, index_topk=16, vocab_size=128, indexer_types=("full", "shared"),
)  # fmt: skip
WIDE_SPEC = replace(SPEC, intermediate_size=1024)  # for two ranks
MAX_MODEL_LEN, PAGE_SIZE = 160, 64
MAX_PAGES = -(-MAX_MODEL_LEN // PAGE_SIZE)
BROKEN_ID = 7  # its embedding is NaN: behind it no request can draw
MOST_ROUNDS = 600
CANARY = 0xFF  # a NaN in every format of the pools
PLAIN = {"num_draft_tokens": 0, "max_num_requests": 1, "prefix_cache": False, "max_model_len": MAX_MODEL_LEN}
OpenEngine = Callable[[dict[str, Any]], AbstractContextManager[Engine]]
SEEDS = (0, 1, 5)
FULL_SEEDS = range(100, 260)


@dataclass(frozen=True)
class Ask:
    """A prompt and what is asked of it."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass
class Heard:
    """What came of one choice.

    Attributes:
        token_ids: Delivered.
        text: Their text.
        logprobs: Of each token where they were asked for.
        finish: How it ended; None while it has not.
        error: Why it failed.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    error: BaseException | None = None

    def take(self, delta: StreamDelta) -> None:
        assert self.finish is None, "nothing follows the end"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += [each.logprob for each in delta.logprobs or ()]
        self.finish, self.error = delta.finish_reason, delta.error


def ask_of(number: int) -> Ask:
    """One of a list of asks without end: prompts begin alike, and most draw by a temperature alone."""
    choose = random.Random(number)
    stem = random.Random(choose.randrange(2)).choices(
        [x for x in range(SPEC.first_special_id) if x != BROKEN_ID], k=150
    )
    grows = choose.random() < 0.5  # over a page's border, on the device
    length = choose.choice((50, 58, 62, 63, 64, 120, 126)) if grows else choose.choice((1, 3, 20, 65, 127, 129, 150))
    prompt = stem[:length]
    if choose.random() < 0.1:
        prompt[-1] = choose.choice((BROKEN_ID, 11, 12, 13))
    asked: dict[str, Any] = {
        "temperature": choose.choice((0.0, 0.0, 0.3, 0.6, 1.0)),
        "seed": choose.randrange(1 << 40),
        "max_tokens": choose.choice((16, 24, 40)) if grows else choose.choice((1, 2, 9) if length < 127 else (None, 9)),
        "ignore_eos": choose.random() < 0.8,
    }
    if choose.random() < 0.2:
        asked["stop_token_ids"] = choose.sample(range(100), k=choose.choice((1, 20, 60)))
    if choose.random() < 0.15:
        asked["n"] = choose.choice((2, 3))
    if choose.random() < (0.15 if grows else 0.6):  # the other path
        asked |= choose.choice(
            (
                {"stop": [chr(choose.randrange(33, 120)) for _ in range(3)]},
                {"min_tokens": min(3, asked["max_tokens"] or 3), "stop_token_ids": list(range(0, 100, 2))},
                {"repetition_penalty": 1.3},
                {"presence_penalty": 0.8, "frequency_penalty": 0.4},
                {"top_p": 0.8},
                {"top_k": 5},
                {"min_p": 0.1},
                {"logprobs": 3},
                {"prompt_logprobs": 1},
                {"logit_bias": {BROKEN_ID: 3.0, 5: -3.0}},
                {"banned_token_ids": list(range(40))},
            )
        )
    return Ask(tuple(prompt), SamplingParams(**asked))


@dataclass(frozen=True)
class Coming:
    """When an ask comes, and what becomes of it: all in rounds from the beginning."""

    ask: Ask
    at: int
    cancelled_at: int | None
    deadline: int | None  # after it came
    priority: int
    salt: str | None


@dataclass(frozen=True)
class Scenario:
    """All that happens to an engine."""

    settings: dict[str, Any]
    most_places: int  # of the rounds on the device
    comings: list[Coming]
    faults: dict[int, int]  # by round: which layer of it fails
    audit_switches: frozenset[int]


def scenario_of(seed: int, *, num_asks: int, num_kinds: int, with_faults: bool = True) -> Scenario:
    choose = random.Random(seed)
    num_requests = choose.randrange(1, 6)
    settings = {
        "num_draft_tokens": choose.choice((0, 1, 3, 5, 7)),
        "max_num_requests": num_requests,
        "num_pages": MAX_PAGES + choose.randrange(num_requests + 1),
        "prefix_cache": choose.random() < 0.7,
        "prefill_chunk_tokens": choose.choice((16, 64, 256)),
        "max_model_len": MAX_MODEL_LEN,
    }
    comings = []
    at = 0
    for _ in range(num_asks):
        at += choose.choice((0, 0, 0, 1, 2, 20))
        comings.append(
            Coming(
                ask_of(choose.randrange(num_kinds)),
                at=at,
                cancelled_at=at + choose.randrange(12) if choose.random() < 0.1 else None,
                deadline=choose.randrange(1, 40) if choose.random() < 0.1 else None,
                priority=choose.choice((0, 0, 0, -1, 1)),
                salt=choose.choice((None, None, "other")),
            )
        )
    span = range(1, at + 20)
    faults = {choose.choice(span): choose.randrange(16) for _ in range(choose.randrange(4))} if with_faults else {}
    switches = frozenset(  # off soon after on, so that the same requests go on
        switch for begin in choose.choices(span, k=choose.choice((0, 0, 2, 5))) for switch in (begin, begin + 2)
    )
    return Scenario(settings, choose.choice((1, 2, 5, 5)), comings, faults, switches)


class Watched:
    """An engine under watch, driven round by round.

    Args:
        engine: With nothing in it.
        patch: Undone with the engine.
        with_canary: Whether pages are looked at; not where another thread writes to them.
    """

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch, clock: "Clock", *, with_canary: bool) -> None:
        self.engine, self.core = engine, engine.core
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._with_canary = with_canary
        self._scheduled: list[Request] = []
        self._writable: dict[int, int] = {}  # page: the first row that may be written
        self._before: list[torch.Tensor] = []
        self._expected: dict[Request, Counter[tuple[int, int]]] = {}
        self._seen_rows: tuple[torch.Tensor, torch.Tensor]  # of the round on the device that was launched last
        self._rows_of_started: list[tuple[StartedRound, Any, torch.Tensor, torch.Tensor]] = []
        self._awaited: StartedRound | None = None
        self._fault_in: int | None = None
        worker = self.core.ranks.worker
        self._pools = [worker.pool, *([worker.draft.pool] if worker.draft is not None else [])]
        self._memories = [pool.buffer(entry.kind) for pool in self._pools for entry in pool.layout.entries]
        if with_canary:
            for memory in self._memories:
                memory.fill_(CANARY)
        self._watch(patch)

    def _watch(self, patch: pytest.MonkeyPatch) -> None:
        schedule, verify, settle = self.core.scheduler.schedule, DecodeRound.verify, EngineCore._settle
        run_layer, start, reserve = LayerLaunches.run, DeviceDecoding._start, self.core.scheduler.reserve
        await_decoded = self.core.ranks.await_decoded
        core, mine = self.core, self.core.ranks.worker.device_rounds

        def scheduled() -> ScheduledBatch | None:
            batch = schedule()
            if batch is not None:
                self._scheduled = list(core.slots.requests_at(batch.slot_B))
                if self._with_canary:
                    self._mark_pages()
            return batch

        def verified(decode_round: DecodeRound) -> torch.Tensor:
            if mine is not None and decode_round.state.length_B.data_ptr() == mine._round.state.length_B.data_ptr():
                state = decode_round.state
                self._seen_rows = state.num_rows_B.clone(), state.token_BQ.clone()
            return verify(decode_round)

        def started(decoding: DeviceDecoding, slot_B: Any) -> Any:
            flight = start(decoding, slot_B)
            self._rows_of_started.append((flight.started, flight.admission_n, *self._seen_rows))
            return flight

        def awaited(started: StartedRound) -> Decoded:
            self._awaited = started
            return await_decoded(started)

        def reserved(slot_B: Any, num_rows_B: Any) -> bool:
            held = core.scheduler.allocator.num_free
            is_reserved = reserve(slot_B, num_rows_B)
            self.counts["reserved pages"] += held - core.scheduler.allocator.num_free
            if self._with_canary:
                self._mark_writable()
            return is_reserved

        def settled(core: EngineCore, batch: ScheduledBatch, decision: Decision, num_drafts_F: Any) -> Any:
            self._count(batch, decision, num_drafts_F)
            return settle(core, batch, decision, num_drafts_F)

        def layer_run(launches: LayerLaunches, *arguments: Any) -> None:
            run_layer(launches, *arguments)
            if self._fault_in is not None:
                self._fault_in -= 1
                if self._fault_in < 0:
                    self._fault_in = None
                    raise RuntimeError("a launch failed")

        patch.setattr(self.core.scheduler, "schedule", scheduled)
        patch.setattr(DecodeRound, "verify", verified)
        patch.setattr(DeviceDecoding, "_start", started)
        patch.setattr(self.core.ranks, "await_decoded", awaited)
        patch.setattr(self.core.scheduler, "reserve", reserved)
        patch.setattr(EngineCore, "_settle", settled)
        patch.setattr(LayerLaunches, "run", layer_run)

    def _mark_pages(self) -> None:
        """Fill pages that nobody owns, and note what the round must not change in the others."""
        self._mark_writable()
        allocator = self.core.scheduler.allocator
        free = [page for page in range(allocator.num_pages) if not allocator.num_holders(page)]
        for memory in self._memories:
            memory[free] = CANARY
        self._before = [memory.clone() for memory in self._memories]

    def _mark_writable(self) -> None:
        tree, slots = self.core.scheduler.prefix_tree, self.core.slots
        kept = set() if tree is None else set(tree.page_ids())
        self._writable = {}
        for request in self._scheduled:
            assert request.slot is not None
            begin = int(slots.computed_S[request.slot])
            for number, page in enumerate(slots.pages(request.slot)):
                if (number + 1) * PAGE_SIZE > begin:
                    assert page not in kept, "a page that others may read is written"
                    assert page not in self._writable, "two requests write a page"
                    self._writable[page] = max(0, begin - number * PAGE_SIZE)

    def _check_pages(self) -> None:
        for before, memory in zip(self._before, self._memories, strict=True):
            changed = (before != memory)[:-1].flatten(1).any(dim=1).nonzero()[:, 0].tolist()
            assert set(changed) <= set(self._writable), "a page was written that is not of the round"
        for pool in self._pools:  # rows of a latent stand one after the other in a page
            latent = next(entry.kind for entry in pool.layout.entries if "latent" in entry.kind.value)
            place = [id(memory) for memory in self._memories].index(id(self._memory_of(pool, latent)))
            for page, first in self._writable.items():
                width = self._memories[place].shape[-1] // PAGE_SIZE * first
                same = self._memories[place][page][:, :width] == self._before[place][page][:, :width]
                assert same.all(), "a row was written anew that others attend to"

    def _memory_of(self, pool: Any, kind: Any) -> torch.Tensor:
        begin = pool.buffer(kind).data_ptr()
        return next(memory for memory in self._memories if memory.data_ptr() == begin)

    def _count(self, batch: ScheduledBatch, decision: Decision, num_drafts_F: Any) -> None:
        """Count what a round judged and kept, from what was emitted and from the device's own rows."""
        num_drafts, emitted = num_drafts_F.tolist(), decision.token_id_FK1.tolist()
        if decision.rows is None:
            self.counts["device rounds"] += 1
            place, (_, admission_n, num_rows_B, token_BQ) = next(
                (place, rows) for place, rows in enumerate(self._rows_of_started) if rows[0] is self._awaited
            )
            self.counts["dropped rounds"] += place
            del self._rows_of_started[: place + 1]
            places = [admission_n.tolist().index(each) for each in self.core.slots.admission_S[batch.slot_B]]
            self.counts["rounds with leavers"] += len(places) < len(admission_n)
            assert num_drafts == (num_rows_B[places] - 1).tolist(), "the host knows the drafts of the device"
            assert not num_rows_B[len(admission_n) :].any(), "nobody is behind the requests"
            drawn = np.flatnonzero(decision.drawable_F).tolist()
            for run, drafted, num in ((emitted[f], token_BQ[places[f]].tolist(), num_drafts[f]) for f in drawn):
                length = sum(token_id >= 0 for token_id in run)
                assert 1 <= length <= num + 1
                assert run[: length - 1] == drafted[1:length]
                assert length - 1 == num or run[length - 1] != drafted[length] or run[length - 1] == BROKEN_ID
        else:
            self.counts["passes"] += 1
        for f, slot in enumerate(batch.slot_B[decision.index_F].tolist()):
            num_kept = sum(token_id >= 0 for token_id in emitted[f]) - 1
            self.counts["kept"] += num_kept
            self._expected.setdefault(self.core.slots.request_at(slot), Counter())[num_drafts[f], num_kept] += 1

    def step(self, fault_in: int | None) -> bool:
        """Run a round; one that fails ends its requests, and no other."""
        before = {request for request in self.core.slots.requests if request is not None}
        before |= set(self.core.scheduler.waiting)
        self._scheduled, self._fault_in, self._before = [], fault_in, []
        late = {request for request in before if request.deadline <= self._clock.now}
        has_run = self.engine.step()
        if self._before:
            self._check_pages()
        if fault_in is not None and self._fault_in is None:
            self.counts["faults"] += 1
            assert all(request.finished for request in self._scheduled)
            ended = {request for request in before - late if request.finished}
            assert ended <= set(self._scheduled)
        self._fault_in = None
        self.check_table()
        return has_run

    def check_table(self) -> None:
        """Slots, pages and counts are consistent between rounds."""
        slots, allocator = self.core.slots, self.core.scheduler.allocator
        tree = self.core.scheduler.prefix_tree
        holders = Counter([] if tree is None else tree.page_ids())
        for slot, request in enumerate(slots.requests):
            assert (request is not None) == bool(slots.active_S[slot])
            if request is None:
                continue
            assert request.slot == slot
            assert not request.finished
            holders.update(slots.pages(slot))
            assert slots.length_S[slot] < slots.limit_S[slot] <= MAX_MODEL_LEN
            if slots.decoding_S[slot]:
                assert slots.computed_S[slot] == slots.length_S[slot] - 1
        for page in range(allocator.num_pages):
            assert allocator.num_holders(page) == holders[page]

    def check_end(self) -> None:
        """All has come back, and the counts are those of the rounds."""
        slots, scheduler = self.core.slots, self.core.scheduler
        assert not slots.active_S.any()
        assert not slots.num_active
        assert not slots.num_attended
        assert not len(scheduler.waiting)
        num_kept = 0 if scheduler.prefix_tree is None else scheduler.prefix_tree.num_pages
        assert scheduler.allocator.num_free + num_kept == scheduler.allocator.num_pages
        total: Counter[tuple[int, int]] = Counter()
        for request, counts in self._expected.items():
            assert _statistics(request.speculation) == _recount(counts)
            total += counts
        assert _statistics(slots.speculation()) == _recount(total)


def _statistics(stats: Any) -> tuple[int, int, tuple[int, ...]]:
    return stats.num_drafts, stats.num_draft_tokens, stats.accepted_per_position


def _recount(counts: Counter[tuple[int, int]]) -> tuple[int, int, tuple[int, ...]]:
    drafted = {pair: num for pair, num in counts.items() if pair[0]}
    longest = max((num_drafts for num_drafts, _ in drafted), default=0)
    return (
        sum(drafted.values()),
        sum(num_drafts * num for (num_drafts, _), num in drafted.items()),
        tuple(sum(num for (_, kept), num in drafted.items() if kept > place) for place in range(longest)),
    )


class Clock:
    """Stands for the module `time` where turns and deadlines are read off it."""

    now = 1000.0

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)


class Alone:
    """What each ask gives when it is alone, without drafts, in passes; each is computed once.

    Args:
        open_engine: Opens an engine with some settings.
    """

    def __init__(self, open_engine: "OpenEngine") -> None:
        self._open_engine = open_engine
        self._heard: dict[str, list[Heard]] = {}
        self._opened = ExitStack()
        self._engine: Engine | None = None

    def of(self, ask: Ask) -> list[Heard]:
        key = repr(ask)
        if key not in self._heard:
            heard = self._heard[key] = [Heard() for _ in range(ask.params.n)]
            engine = self._plain_engine()
            submission = engine.prepare(list(ask.prompt), ask.params, on_delta=_to(heard))
            submission.start()
            while engine.step():
                pass
        return self._heard[key]

    def close(self) -> None:
        self._opened.close()

    def _plain_engine(self) -> Engine:
        if self._engine is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(rank_setup, "_decodes_on_device", lambda *_args, **_settings: False)
                self._engine = self._opened.enter_context(self._open_engine(PLAIN))
            assert self._engine.core.ranks.worker.device_rounds is None
        return self._engine


def _to(heard: list[Heard]) -> Any:
    return lambda delta: heard[delta.index].take(delta)


def of_one_rank(path: Path) -> OpenEngine:
    return lambda settings: Engine.from_pretrained(path, dtype="bfloat16", **settings)


def of_two_ranks(path: Path) -> OpenEngine:
    return lambda settings: _thread_engine(path, settings)


@contextmanager
def _thread_engine(path: Path, settings: dict[str, Any]) -> Iterator[Engine]:
    shares = [
        load_checkpoint(path, dtype=torch.bfloat16, tensor_parallel=TensorParallel(rank=rank, size=2), keep_fp8=True)
        for rank in range(2)
    ]
    running = ThreadEngine(shares, EngineConfig(**settings, tp_size=2), with_draft=settings["num_draft_tokens"] > 0)
    try:
        yield running.engine(tokenizer=Tokenizer(path / "tokenizer.json"))
    finally:
        running.close()


def play(scenario: Scenario, engine: Engine, *, with_canary: bool) -> tuple[list[list[Heard]], Counter[str]]:
    """Let a scenario happen to an engine; gives what each ask heard, and how often what was seen."""
    clock = Clock()
    all_heard = [[Heard() for _ in range(coming.ask.params.n)] for coming in scenario.comings]
    submissions: list[Submission] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (core_module, engine_module, scheduler_module):
            patch.setattr(module, "time", clock.module())
        watched = Watched(engine, patch, clock, with_canary=with_canary)
        core = engine.core
        faults = dict(scenario.faults)
        for now in range(MOST_ROUNDS):
            clock.now = 1000.0 + now
            while len(submissions) < len(all_heard) and scenario.comings[len(submissions)].at <= now:
                coming = scenario.comings[len(submissions)]
                submissions.append(
                    engine.prepare(
                        list(coming.ask.prompt),
                        coming.ask.params,
                        on_delta=_to(all_heard[len(submissions)]),
                        cache_salt=coming.salt,
                        priority=coming.priority,
                        deadline_s=coming.deadline,
                    )
                )
                submissions[-1].start()
            for submission, coming in zip(submissions, scenario.comings, strict=False):
                if coming.cancelled_at == now:
                    submission.cancel()
            if now in scenario.audit_switches:
                if core.audit is None:
                    core.start_audit(rate=1.0)
                else:
                    assert not core.audit.num_disagreements
                    core.audit = None
            has_run = watched.step(faults.pop(now, None))
            watched.counts["rounds"] += has_run
            if not has_run and len(submissions) == len(all_heard):
                break
        else:
            raise AssertionError("it did not end")
        watched.check_end()
        watched.counts["preemptions"] += core.scheduler.num_preemptions
    return all_heard, watched.counts


def check(scenario: Scenario, all_heard: list[list[Heard]], alone: Alone) -> None:
    """Compare what was heard with what each ask gives alone."""
    for coming, heard in zip(scenario.comings, all_heard, strict=True):
        for mine, theirs in zip(heard, alone.of(coming.ask), strict=True):
            about = f"{coming} ended by {mine.finish}: {mine.error!r}"
            assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)], about
            if mine.finish in {"stop", "length"}:
                assert (mine.token_ids, mine.text, mine.finish) == (theirs.token_ids, theirs.text, theirs.finish), about
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
            elif mine.finish == "cancelled":
                assert coming.cancelled_at is not None, about
            else:
                assert mine.finish == "error", about
                if isinstance(mine.error, DeadlineError):
                    assert coming.deadline is not None, about
                elif "a launch failed" in str(mine.error):
                    assert scenario.faults, about
                else:
                    assert isinstance(mine.error, RoundError), about
                    assert "logits are not finite" in str(mine.error), about
                    assert mine.token_ids == theirs.token_ids, about
                    assert theirs.error is not None, about
                    assert "logits are not finite" in str(theirs.error), about


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_broken_checkpoint(tmp_path_factory.mktemp("kernels"), SPEC)


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_broken_checkpoint(tmp_path_factory.mktemp("wide"), WIDE_SPEC)


def write_broken_checkpoint(path: Path, spec: TinySpec) -> Path:
    write_engine_checkpoint(path, spec, branch_gain=0.2)
    tensors = read_tensors(path)
    tensors["model.embed_tokens.weight"][BROKEN_ID] = torch.nan
    write_shards(path, tensors, num_shards=1)
    return path


@pytest.fixture(scope="module")
def alone(path: Path) -> Iterator[Alone]:
    with closing(Alone(of_one_rank(path))) as alone:
        yield alone


@pytest.fixture(scope="module")
def alone_on_two_ranks(wide_path: Path) -> Iterator[Alone]:
    with closing(Alone(of_two_ranks(wide_path))) as alone:
        yield alone


@pytest.fixture(autouse=True)
def _on_kernels(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_definitions(monkeypatch, GlmConfig.from_file(path / "config.json"))
    monkeypatch.setattr(kernel_definitions, "_values", _shared_values)
    monkeypatch.setattr(layer_launches, "PackedSparseMla", _Attention)
    choice = KernelChoice(kernels=KernelSet.HOPPER)
    monkeypatch.setattr(rank_setup, "choose_kernels", lambda *_args, **_settings: choice)
    with torch.no_grad():
        yield


_values_of = kernel_definitions._values.__wrapped__
_values_by_content: dict[bytes, torch.Tensor] = {}


@functools.lru_cache(maxsize=200)
def _shared_values(linear: BlockFp8Linear) -> torch.Tensor:
    """All engines here have the same weights, whose float64 values take most of the time that opening one takes."""
    content = hashlib.sha256(linear.weight_OI.view(torch.uint8).numpy().tobytes())
    content.update(linear.scale_JB.numpy().tobytes())
    if content.digest() not in _values_by_content:
        _values_by_content[content.digest()] = _values_of(linear)
    return _values_by_content[content.digest()]


class _Attention:
    """What `packed_sparse_mla_ref` defines, all rows at once."""

    def __init__(self, **_sizes: Any) -> None:
        pass

    def __call__(
        self,
        query_TAX: torch.Tensor,
        pool_PB: torch.Tensor,
        index_TK: torch.Tensor,
        count_T: torch.Tensor,
        *,
        scale: float,
        out_TAL: torch.Tensor,
        lse_TA: torch.Tensor,
        written_last: WrittenLast = WrittenLast.ANYTHING,
    ) -> None:
        out_TAL.zero_()
        lse_TA.fill_(-torch.inf)
        live_N = (count_T > 0).nonzero()[:, 0]
        if not len(live_N):
            return  # all requests ended on the device, in a round that was started ahead
        row_NK = index_TK[live_N].long()
        is_read_NK = (torch.arange(row_NK.shape[1]) < count_T[live_N, None]) & (row_NK >= 0)
        row_NK = row_NK.clamp(min=0)
        row_NKB = pool_PB.unflatten(1, (PAGE_SIZE, ROW_BYTES))[row_NK // PAGE_SIZE, row_NK % PAGE_SIZE]
        key_NKX = decode_fp8_packed(row_NKB.flatten(0, 1), LATENT_DIM, ROPE_DIM).double().view(*row_NK.shape, -1)
        key_NKX = key_NKX.masked_fill(~is_read_NK[..., None], 0)
        score_NAK = torch.einsum("nax,nkx->nak", query_TAX[live_N].double(), key_NKX) * scale
        score_NAK = score_NAK.masked_fill(~is_read_NK[:, None], -torch.inf)
        out_TAL[live_N] = (score_NAK.softmax(dim=-1) @ key_NKX[..., :LATENT_DIM]).to(out_TAL.dtype)
        lse_TA[live_N] = score_NAK.logsumexp(dim=-1).float()


@contextmanager
def few_places(most_places: int) -> Iterator[None]:
    """Let rounds on the device have no more places than these."""

    def round_sizes(**sizes: Any) -> RoundSizes:
        return RoundSizes(**{**sizes, "num_requests": min(sizes["num_requests"], most_places)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_setup, "RoundSizes", round_sizes)
        yield


def run(scenario: Scenario, open_engine: OpenEngine, alone: Alone, *, with_canary: bool = True) -> Counter[str]:
    with few_places(scenario.most_places), open_engine(scenario.settings) as engine:
        all_heard, counts = play(scenario, engine, with_canary=with_canary)
    check(scenario, all_heard, alone)
    return counts


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_says_what_it_says_alone(seed: int, path: Path, alone: Alone) -> None:
    counts = run(scenario_of(seed, num_asks=6, num_kinds=16), of_one_rank(path), alone)
    assert counts["device rounds"]
    assert counts["passes"]


@pytest.mark.full
@pytest.mark.parametrize("seed", FULL_SEEDS)
def test_a_request_says_what_it_says_alone_in_many_scenarios(seed: int, path: Path, alone: Alone) -> None:
    run(scenario_of(seed, num_asks=16, num_kinds=80), of_one_rank(path), alone)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.full if seed else ()) for seed in range(12)])
def test_so_it_does_on_two_ranks(seed: int, wide_path: Path, alone_on_two_ranks: Alone) -> None:
    scenario = scenario_of(seed, num_asks=4, num_kinds=12, with_faults=False)
    run(scenario, of_two_ranks(wide_path), alone_on_two_ranks, with_canary=False)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_two_ranks_that_share_pages_leave_nothing_behind(seed: int, wide_path: Path) -> None:
    """What they say depends on who has which page, by the rounding of the parts."""
    scenario = scenario_of(seed, num_asks=6, num_kinds=24, with_faults=False)
    settings = {**scenario.settings, "num_pages": -(-scenario.settings["num_pages"] // 2), "dcp_size": 2}
    with few_places(scenario.most_places), _thread_engine(wide_path, settings) as engine:
        all_heard, counts = play(scenario, engine, with_canary=False)
    for coming, heard in zip(scenario.comings, all_heard, strict=True):
        for each in heard:
            assert each.finish in {"stop", "length", "cancelled", "error"}
            assert each.error is None or coming.deadline is not None or "not finite" in str(each.error)
    assert counts["rounds"]
