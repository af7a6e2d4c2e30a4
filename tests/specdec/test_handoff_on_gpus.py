"""A prompt computed on one GPU and decoded on another gives what it gives where one GPU does both.

Where there is one GPU, processes share it. Every write is posted behind passes that the device has not run yet: what it
carries shows whether it waits for them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.dcp.layout import EntryKind
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError, TransferError
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.ranks import layer_parts, rank_setup
from specdec.result import GenerationResult
from specdec.sampling.sampling_params import SamplingParams
from specdec.transfer.descriptors import expand_path
from specdec.transfer.packed_sending import PackedSending, PackedSource
from specdec.transfer.packing import PackBuffer
from specdec.transfer.reshard_plan import plan_reshard
from specdec.transfer.transport import RegionCopies, Transport, Write, WriteState, open_transport
from tests.support.engines import Ask, Checkpoints, drawn, greedy, prompt_of, serve, tokens
from tests.support.first_difference import assert_equal_but_for_narrow_choices
from tests.support.gpu import needs_gpu
from tests.support.handoff import serving
from tests.support.packed_transfer import PackedTransfer
from tests.support.prefill_process import prefill_process
from tests.support.real_directory import real_directory
from tests.support.reshard_cases import moved_by_definition
from tests.support.thread_engine import ThreadEngine
from tests.transfer.test_packed_sending import interleaved_case

pytestmark = [needs_gpu, pytest.mark.xdist_group("two GPUs")]

PREFILL, DECODE = "cuda:0", f"cuda:{min(1, max(0, torch.cuda.device_count() - 1))}"
WAIT_S = 60.0

TINY = {"max_model_len": 1024, "page_size": 16}
REAL = {"dtype": "bfloat16", "max_model_len": 4096, "max_num_requests": 4, "num_pages": 256}
LENGTHS = (63, 2500, 1)  # the second is of several chunks, and those of several passes
PARAMS = (
    SamplingParams(max_tokens=240, temperature=0.8, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
)
KILLED_LENGTH = 3500


@pytest.fixture(params=["local", "mooncake", "nixl"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that reaches the memory of GPUs here."""
    name: str = request.param
    monkeypatch.delenv("UCX_TLS", raising=False)  # tests of the host's memory keep to sockets
    try:
        with contextlib.closing(open_transport(name)) as opened:
            opened.register({"probe": opened.allocate(4096, device=PREFILL)})
    except ConfigError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with real_directory(tmp_path_factory) as path:
        yield path


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 150_000, (length,), generator=generator).tolist() for length in (*LENGTHS, KILLED_LENGTH)]


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[tuple[int, ...]]:
    """What one engine says that computes the prompts, too."""
    with started(directory, num_draft_tokens=5, **REAL) as engine:
        assert "kernels: hopper" in engine.report_lines()
        return token_ids(engine.generate(prompts()[: len(LENGTHS)], PARAMS))


@pytest.mark.full  # 25 GB of disk
def test_kernels_on_two_gpus_say_what_one_says_and_outlive_a_prefill_that_is_killed(
    directory: Path, alone: list[tuple[int, ...]], transport: str
) -> None:
    flags = flags_of(**REAL, device=PREFILL, transport=transport, prefill_chunk_tokens=512)
    with (
        prefill_process(*flags, model=str(directory)) as (process, address),
        started(directory, num_draft_tokens=5, prefill=[address], transport=transport, **REAL) as engine,
    ):
        assert engine.intake is not None
        assert engine.core.ranks.worker.pool.memory(EntryKind.LATENT).device == torch.device(DECODE)
        assert engine.core.ranks.worker.device_rounds is not None
        first, *others, killed = prompts()

        stream = engine.stream(first, PARAMS[0])
        next(stream)
        num_drafted = engine.core.slots.speculation().num_draft_tokens
        later = [engine.stream(*each) for each in zip(others, PARAMS[1:], strict=True)]
        engine.step()
        while engine.intake.is_waiting:
            engine.step()
        assert engine.core.slots.speculation().num_draft_tokens > num_drafted, "rounds ran while KV arrived"
        assert token_ids([each.result() for each in (stream, *later)]) == alone
        assert engine.intake.counts.num_received == len(LENGTHS)

        stream = engine.stream(first, PARAMS[0])
        next(stream)
        failing = engine.stream(killed, PARAMS[1])
        link = engine.intake.links[0]
        engine.step()
        while link.num_tokens == KILLED_LENGTH:  # no chunk was computed and sent
            engine.step()
        process.kill()
        with pytest.raises(TransferError, match="was lost"):
            failing.result()
        assert token_ids([stream.result()]) == alone[:1]
        wait_until(lambda: engine.kv_pages()[0] == engine.kv_pages()[1])


def test_torch_on_two_gpus_says_what_one_says_and_a_prefill_that_is_killed_fails_its_prompt_alone(
    transport: str,
) -> None:
    short, long = list(range(5, 70)), [5 + i % 200 for i in range(900)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with started("glm-tiny", **TINY) as engine:
        expected = token_ids(engine.generate([short, long], params))
    flags = flags_of(**TINY, device=PREFILL, transport=transport, prefill_chunk_tokens=48)
    with (
        prefill_process(*flags) as (process, address),
        started("glm-tiny", prefill=[address], transport=transport, **TINY) as engine,
    ):
        assert engine.core.ranks.worker.pool.memory(EntryKind.LATENT).device == torch.device(DECODE)
        assert engine.intake is not None
        assert token_ids(engine.generate([short, long], params)) == expected

        failing = engine.stream(long, params)
        engine.step()
        process.kill()
        with pytest.raises(TransferError, match="was lost"):
            failing.result()
        wait_until(lambda: engine.kv_pages()[0] == engine.kv_pages()[1])


def test_a_group_on_a_gpu_is_refused_by_a_prefill_on_the_host() -> None:
    with (
        prefill_process(*flags_of(**TINY, device="cpu")) as (_, address),
        pytest.raises(ConfigError, match="memory of the decode group is cuda, of the prefill cpu"),
    ):
        started("glm-tiny", prefill=[address], **TINY)


@pytest.mark.parametrize("sending", ["pages", "packed"])
def test_two_ranks_of_a_layer_split_on_one_gpu_send_their_layers(
    sending: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers go one by one, as pages or, packed, as rows through a buffer of a few."""
    monkeypatch.setattr(layer_parts, "PART_BYTES", 1)
    if sending == "packed":
        monkeypatch.setattr(rank_setup, "RankTransfer", PackedTransfer)
    asks = [
        Ask(prompt_of(length, seed=length), greedy(6) if length % 2 else drawn(length, 6)) for length in (1, 5, 16, 61)
    ]
    path, shared = checkpoints.path("parallel"), {"page_size": 4, "max_model_len": 128, "max_num_requests": 4}
    here, there = (load_checkpoint(path, dtype=torch.float32, device=device) for device in (PREFILL, DECODE))
    expected = serve(Engine(there, EngineConfig(num_draft_tokens=3, **shared)), asks)
    config = EngineConfig(num_draft_tokens=0, cp_size=2, transport="local", prefill_chunk_tokens=8, **shared)
    ranks = ThreadEngine([here, here], config, with_draft=True)
    try:
        ranks.poison()
        with (
            serving(ranks.engine()) as server,
            Engine(there, EngineConfig(num_draft_tokens=3, prefill=(server.address,), **shared)) as engine,
        ):
            results = serve(engine, asks)
            assert engine.kv_pages()[0] == engine.kv_pages()[1]
            sent = {(rank, kind) for (rank, _, kind), counts in server.counts.paths.items() if counts.num_bytes}
    finally:
        ranks.close()
    assert {(0, "target.latent"), (1, "target.latent"), (1, "draft.latent")} <= sent
    assert_equal_but_for_narrow_choices(checkpoints.load("parallel"), asks, tokens(results), tokens(expected))


@pytest.mark.parametrize("sending", ["token by token", "packed"])
@pytest.mark.parametrize("transport", ["local"], indirect=True)
def test_a_layer_split_is_sent_to_ranks_that_take_tokens_in_turns(sending: str, transport: str) -> None:
    """What is sent is stored by launches that have not run when it is posted."""
    case = interleaved_case()
    plan = plan_reshard({"entry": case.span})
    with contextlib.ExitStack() as stack:
        arrived = [arrival(stack, transport, noise) for noise in case.destination_memory]
        sent: list[Write] = []
        for rank, stored in enumerate(case.source_memory):
            sender = stack.enter_context(contextlib.closing(open_transport(transport)))
            memory = sender.allocate(len(stored), device=PREFILL)
            buffer = sender.allocate(3 * 512, device=PREFILL)
            sender.register({"entry": memory, "pack": buffer})
            peers = {place: sender.connect(receiver.address()) for place, (receiver, _) in enumerate(arrived)}
            staged = torch.from_numpy(stored).to(PREFILL)
            keep_busy()
            memory.copy_(staged)
            if sending == "packed":
                sent += PackedSending(sender, PackBuffer(buffer, num_regions=3), buffer_name="pack").send(
                    plan.paths_from(rank),
                    {"entry": PackedSource(memory, case.source_regions[rank])},
                    lambda path: case.destination_regions[path.destination_rank],
                    peers,
                    timeout_s=WAIT_S,
                    stored=torch.cuda.current_stream(PREFILL).record_event(),
                )
                continue
            for path in plan.paths_from(rank):
                place = path.destination_rank
                copies = expand_path(path, case.source_regions[rank], case.destination_regions[place])
                sent.append(sender.write(peers[place], [RegionCopies("entry", "entry", copies)]))
        for write in sent:
            assert write.wait(WAIT_S) is WriteState.DONE, write.error
        for (_, memory), right in zip(arrived, moved_by_definition(case), strict=True):
            assert np.array_equal(memory.cpu().numpy(), right)


def started(model: str | Path, **settings: Any) -> Engine:
    """An engine on the GPU that decodes, which keeps no prefixes: every prompt is computed anew."""
    return Engine.from_pretrained(model, device=DECODE, prefix_cache=False, **settings)


def flags_of(**settings: Any) -> list[str]:
    """The same for a prefill."""
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*words, "--no-prefix-cache"]


def arrival(stack: contextlib.ExitStack, name: str, noise: Any) -> tuple[Transport, torch.Tensor]:
    """Open a destination that is full of noise."""
    receiver = stack.enter_context(contextlib.closing(open_transport(name)))
    memory = receiver.allocate(len(noise), device=DECODE)
    memory.copy_(torch.from_numpy(noise))
    receiver.register({"entry": memory})
    return receiver, memory


def keep_busy() -> None:
    """Give the device tens of milliseconds of work."""
    matrix = torch.ones((4096, 4096), device=PREFILL)
    for _ in range(20):
        matrix = matrix @ matrix.clamp(max=1e-4)


def token_ids(results: list[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.choices[0].token_ids for result in results]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
