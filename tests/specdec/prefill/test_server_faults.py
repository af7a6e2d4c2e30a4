"""Whatever goes wrong with a hand-off fails that request, or sends it elsewhere; all others get their right text.

Ranks are threads and transports are real, but for the faults that a test asks for. Tags such as O18 are explained in
`tests/INVARIANTS.md`.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from specdec.dcp.layout import KvFormat
from specdec.engine import Engine
from specdec.errors import ConfigError, TransferError
from specdec.prefill.server import PrefillServer
from specdec.result import BatchError
from specdec.transfer.address import VERSION as ADDRESS_VERSION
from specdec.transfer.address import AddressRecord, ProcessRecord, RegionRecord, encode_address
from specdec.transfer.line import frame
from specdec.transfer.messages import (
    PROTOCOL_VERSION,
    Abort,
    Ask,
    Destination,
    Done,
    Drained,
    Failed,
    Hello,
    Progress,
    Refused,
    Start,
    Unknown,
    Welcome,
    encode,
)
from specdec.transfer.transport import WriteState
from tests.support.engines import Ask as Question
from tests.support.engines import Checkpoints, drawn, greedy, prompt_of, serve, tokens
from tests.support.faulty_transport import Fault
from tests.support.handoff import NEVER_S, Groups, serving
from tests.support.scripted_prefill import DECODE_EPOCH, Wire, call
from tests.support.thread_engine import ThreadEngines
from tests.support.transfer_peer import open_or_skip

MODEL = "parallel"
ASKS = [
    Question(prompt_of(21), greedy(6)),
    Question(prompt_of(9, seed=1), drawn(3, 8)),
    Question(prompt_of(30, seed=2), greedy(5)),
]


@pytest.fixture
def groups(checkpoints: Checkpoints, thread_engines: ThreadEngines) -> Groups:
    return Groups(checkpoints, thread_engines)


@pytest.fixture
def right(checkpoints: Checkpoints) -> Callable[[Sequence[Question]], list[tuple[int, ...]]]:
    """What an engine that computes its prompts gives."""
    return lambda asks: [checkpoints.plain(ask, MODEL) for ask in asks]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for other threads."""
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("this did not come to pass")


def is_at_start(engine: Engine) -> bool:
    free, everything = engine.kv_pages()
    assert engine.intake is not None
    return free == everything and engine.intake.counts.num_held_pages == 0


@pytest.mark.parametrize(
    "faults",
    [
        [Fault.DELAY] * 3,
        [Fault.SWAP, None, Fault.SWAP, Fault.SWAP, None],
        [Fault.DELAY, Fault.SWAP, None, Fault.DELAY, Fault.SWAP, None],
    ],
    ids=["delayed", "swapped", "both"],
)
def test_writes_may_be_late_and_out_of_order(groups: Groups, right: Any, faults: list[Fault | None]) -> None:
    """A53: a prompt is complete when every write has ended, in whatever order."""
    with groups.prefill(prefix_cache=False) as prefill, groups.decode(prefill, prefix_cache=False) as engine:
        for _ in range(2):
            prefill.transport.faults.extend(faults)
            assert tokens(serve(engine, ASKS)) == right(ASKS)
        assert is_at_start(engine)
        wait_until(lambda: prefill.is_at_start)


@pytest.mark.parametrize("fault", [Fault.FAIL_TO_POST, Fault.FAIL_AFTER_LANDING])
@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_a_write_that_fails_fails_its_request_and_no_other(
    groups: Groups, right: Any, fault: Fault, num_before: int
) -> None:
    """B51, A51: in the first chunk, between two, in the last."""
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        prefill.transport.faults.extend([*([None] * num_before), fault])
        with pytest.raises(TransferError, match="as the test wants it"):
            serve(engine, ASKS[2:])
        assert tokens(serve(engine, ASKS)) == right(ASKS)
        wait_until(lambda: is_at_start(engine) and prefill.is_at_start)


def test_a_write_that_fails_beside_others_fails_alone(groups: Groups, right: Any) -> None:
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        prefill.transport.faults.append(Fault.FAIL_TO_POST)
        with pytest.raises(BatchError) as caught:
            serve(engine, ASKS)
        results = caught.value.results
        assert sum(result is None for result in results) == 1
        for result, expected in zip(results, right(ASKS), strict=True):
            assert result is None or result.token_ids == expected
        wait_until(lambda: is_at_start(engine) and prefill.is_at_start)


def test_pages_of_a_failed_write_that_may_still_land_are_held_on_both_sides(groups: Groups, right: Any) -> None:
    """B47, A49, A50: until it has landed; then both pools are what they were."""
    with groups.prefill(prefix_cache=False) as prefill, groups.decode(prefill) as engine:
        prefill.transport.faults.append(Fault.LAND_LATE)
        with pytest.raises(TransferError, match="lands later"):
            serve(engine, ASKS[2:])
        assert tokens(serve(engine, ASKS)) == right(ASKS)
        assert not is_at_start(engine)
        assert not prefill.is_at_start
        prefill.transport.release()
        wait_until(lambda: is_at_start(engine) and prefill.is_at_start)
        assert tokens(serve(engine, ASKS)) == right(ASKS)


def test_pages_that_a_write_is_on_its_way_to_are_not_given_to_the_next_request(groups: Groups, right: Any) -> None:
    """O18: the next request waits for the pages, and its text is not that of the late write."""
    first, second = Question(prompt_of(29), greedy(3)), Question(prompt_of(26, seed=1), greedy(4))
    with (
        groups.prefill(max_model_len=32) as prefill,
        groups.decode(prefill, max_model_len=32, num_pages=8, prefix_cache=False) as engine,
    ):
        prefill.transport.faults.extend([Fault.STUCK] * 4)
        stream = engine.stream(first.prompt, first.params)
        wait_until(lambda: engine.step() and len(prefill.transport.writes) > 0)
        stream.close()
        assert engine.kv_pages() == (0, 8)
        waiting = engine.stream(second.prompt, second.params)
        for _ in range(20):
            assert engine.step()  # there is something to wait for
        assert engine.kv_pages() == (0, 8)
        prefill.transport.faults.clear()  # of the first prompt fewer writes may have been posted
        prefill.transport.release()
        assert waiting.result().token_ids == right([second])[0]
        assert is_at_start(engine)
        wait_until(lambda: prefill.is_at_start)


@pytest.mark.parametrize("transport", ["local", "mooncake", "nixl"])
def test_a_request_does_not_wait_for_ever_for_pages_that_a_prefill_holds(
    groups: Groups, right: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B47: the last resort. The group takes other memory, and what is written late goes where nobody reads."""
    open_or_skip(transport).close()
    question = Question(prompt_of(26, seed=1), greedy(4))
    with (
        groups.prefill(max_model_len=32, transport=transport) as prefill,
        groups.decode(prefill, max_model_len=32, num_pages=4, tp_size=2, dcp_size=2, transport=transport) as engine,
    ):
        assert engine.intake is not None
        prefill.transport.faults.extend([Fault.STUCK] * 100)
        stream = engine.stream(prompt_of(29), greedy(3))
        wait_until(lambda: engine.step() and len(prefill.transport.writes) > 0)
        stream.close()
        assert engine.kv_pages() == (0, 8)
        wait_until(lambda: prefill.server.counts.num_failed == 1)
        late = list(prefill.transport.writes)
        prefill.transport.faults.clear()
        monkeypatch.setattr(engine.intake, "has_kept_waiting", lambda _request: True)  # `test_intake` has the clock
        assert tokens(serve(engine, [question])) == right([question])
        assert engine.intake.counts.num_reopened == 1
        assert is_at_start(engine)
        prefill.transport.release()
        for write in late:
            assert write.wait(NEVER_S) is WriteState.FAILED
        assert tokens(serve(engine, [question, *ASKS[1:2]])) == right([question, *ASKS[1:2]])
        wait_until(lambda: prefill.is_at_start)


def test_pages_are_counted_once_whoever_holds_them(groups: Groups, right: Any) -> None:
    """Those of a prompt that is on its way have two holders and are in no tree."""
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        serve(engine, ASKS[2:])
        assert is_at_start(engine)
        prefill.transport.faults.extend([Fault.HOLD] * 20)
        stream = engine.stream(prompt_of(23, seed=5), greedy(4))
        wait_until(lambda: engine.step() and len(prefill.transport.writes) > 3)
        free, everything = engine.kv_pages()
        assert everything - free == -(-23 // 4)
        stream.close()
        prefill.transport.faults.clear()
        prefill.transport.release()
        wait_until(lambda: is_at_start(engine))


def test_a_prefill_whose_prompts_wait_for_pages_waits_too(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for work a few times a second, and not as fast as it can."""
    with (
        groups.prefill(max_model_len=32, num_pages=8, prefix_cache=False) as prefill,
        groups.decode(prefill, max_model_len=32) as engine,
    ):
        prefill.transport.faults.append(Fault.LAND_LATE)  # its pages are read from until it has landed
        with pytest.raises(TransferError, match="lands later"):
            serve(engine, [Question(prompt_of(30), greedy(2))])
        stream = engine.stream(prompt_of(29, seed=1), greedy(2))
        wait_until(lambda: engine.step() and bool(prefill.engine.core.scheduler.waiting))
        turns, step = [], prefill.engine.core.step
        monkeypatch.setattr(prefill.engine.core, "step", lambda: turns.append(None) or step())
        for _ in range(50):
            engine.step()  # waits up to 20 ms
        assert len(turns) < 100
        prefill.transport.release()
        assert len(stream.result().token_ids) == 2


def test_the_right_text_comes_after_a_storm_of_aborts(groups: Groups, right: Any) -> None:
    """O19: 200 prompts that are given up before, during and after their chunks leave nothing behind."""
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        for place in range(200):
            ask = Question(prompt_of(5 + place % 40, seed=place), greedy(4))
            stream = engine.stream(ask.prompt, ask.params)
            for _ in range(place % 3):
                engine.step()
            stream.close()
        assert tokens(serve(engine, ASKS)) == right(ASKS)
        wait_until(lambda: is_at_start(engine) and prefill.is_at_start)
        assert engine.intake is not None
        assert engine.intake.counts.num_lost == 0


def test_the_right_text_comes_after_a_storm_of_prompts_that_the_prefill_gives_up(
    groups: Groups, right: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O19: in their first, middle or last chunk, before it runs or after; each is told, and nothing is left of it."""
    num_storm = 200
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        verify, num_left, is_run_first = prefill.worker.verify, 0, False

        def fail_in_turn(task: Any) -> Any:
            nonlocal num_left
            run, num_left = verify(task), num_left - 1
            if num_left:
                return run
            if is_run_first:
                run()
            raise ZeroDivisionError("as the test wants it")

        monkeypatch.setattr(prefill.worker, "verify", fail_in_turn)
        for place in range(num_storm):
            num_left, is_run_first = 1 + place % 3, place % 2 > 0
            with pytest.raises(TransferError, match=r"could not be computed.*as the test wants it"):
                serve(engine, [Question(prompt_of(24, seed=place), greedy(4))])
        assert tokens(serve(engine, ASKS)) == right(ASKS)
        wait_until(lambda: is_at_start(engine) and prefill.is_at_start)
        assert engine.intake is not None
        ours, theirs = engine.intake.counts, prefill.server.counts
        assert (ours.num_started, ours.num_lost, ours.num_received) == (num_storm + 3, num_storm, 3)
        assert (theirs.num_started, theirs.num_failed, theirs.num_done) == (num_storm + 3, num_storm, 3)
        assert ours.num_abandoned == ours.num_reopened == theirs.num_stale == 0


def test_a_stream_that_is_closed_while_its_prompt_is_on_its_way_disturbs_nobody(groups: Groups, right: Any) -> None:
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        prefill.transport.faults.extend([Fault.HOLD, Fault.DELAY, Fault.HOLD])
        streams = [engine.stream(ask.prompt, ask.params) for ask in (*ASKS, *ASKS)]
        wait_until(lambda: engine.step() and len(prefill.transport.writes) > 2)
        streams[0].close()
        streams[4].close()
        prefill.transport.release()
        results = [streams[place].result().token_ids for place in (1, 2, 3, 5)]
        expected = right(ASKS)
        assert results == [expected[1], expected[2], expected[0], expected[2]]
        wait_until(lambda: is_at_start(engine) and prefill.is_at_start)


@pytest.mark.parametrize("failing", ["before it runs", "after it has run"])
@pytest.mark.parametrize("num_passes", [0, 1, 2])
def test_a_round_of_the_prefill_that_fails_is_told_at_once(
    groups: Groups, right: Any, num_passes: int, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O19, A51: in the first, a middle and the last chunk; the group does not wait for its deadline."""
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        worker, passes = prefill.worker, iter(range(1000))
        verify = worker.verify

        def fail_once(task: Any) -> Any:
            run, is_failing = verify(task), next(passes) == num_passes
            if is_failing and failing == "before it runs":
                raise ZeroDivisionError("as the test wants it")

            def run_and_fail() -> Any:
                verified = run()
                if is_failing:
                    raise ZeroDivisionError("as the test wants it")
                return verified

            return run_and_fail

        monkeypatch.setattr(worker, "verify", fail_once)
        with pytest.raises(TransferError, match=r"could not be computed.*as the test wants it"):
            serve(engine, [Question(prompt_of(24), greedy(4))])
        assert tokens(serve(engine, ASKS)) == right(ASKS)
        wait_until(lambda: is_at_start(engine) and prefill.is_at_start)


def test_a_group_whose_memory_is_gone_between_two_chunks_fails_alone(
    groups: Groups, right: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B49: as when it is killed; what is left of it at the prefill goes once its line is over."""
    with groups.prefill() as prefill, groups.decode(prefill) as dying, groups.decode(prefill) as other:
        memory, verify, passes = dying.core.ranks.worker.transfer, prefill.worker.verify, iter(range(1000))
        assert memory is not None

        def verify_without_memory(task: Any) -> Any:
            if next(passes) == 1:
                memory.close()
            return verify(task)

        monkeypatch.setattr(prefill.worker, "verify", verify_without_memory)
        with pytest.raises(TransferError, match=r"was closed|has ended|cannot be mapped"):
            serve(dying, [Question(prompt_of(24), greedy(4))])
        dying.close()
        wait_until(lambda: prefill.server.num_groups == 1)
        assert tokens(serve(other, ASKS)) == right(ASKS)
        wait_until(lambda: is_at_start(other) and prefill.is_at_start)


def test_a_rank_that_cannot_begin_a_round_fails_its_requests_and_no_other(
    groups: Groups, right: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A52, A33: what the ranks had prepared for the round is dropped by all of them."""
    with groups.prefill_of_two() as (prefill, second), groups.decode(prefill) as engine:
        verify, passes = second.verify, iter(range(1000))

        def fail_once(task: Any) -> Any:
            run = verify(task)
            if next(passes) == 1:
                raise ZeroDivisionError("as the test wants it")
            return run

        monkeypatch.setattr(second, "verify", fail_once)
        with pytest.raises(TransferError, match="could not be computed"):
            serve(engine, [Question(prompt_of(24), greedy(4))])
        assert len(serve(engine, ASKS)) == len(right(ASKS))
        wait_until(lambda: is_at_start(engine) and prefill.is_at_start)


def test_a_prompt_that_one_prefill_fails_is_computed_by_another(groups: Groups, right: Any) -> None:
    """A51: nothing of it was emitted, so it may start over."""
    with (
        groups.prefill() as broken,
        groups.prefill() as sound,
        groups.decode(broken, sound, num_draft_tokens=3) as engine,
    ):
        broken.transport.faults.extend([Fault.FAIL_TO_POST] * 100)
        asks = [*ASKS, *(Question(prompt_of(12, seed=seed), drawn(seed, 5)) for seed in range(4))]
        assert tokens(serve(engine, asks)) == right(asks)
        assert engine.intake is not None
        assert engine.intake.counts.num_lost > 0
        assert [link.counts.num_failed for link in engine.intake.links][1] == 0
        wait_until(lambda: is_at_start(engine) and broken.is_at_start and sound.is_at_start)


def test_where_every_prefill_fails_all_their_reasons_are_told(groups: Groups) -> None:
    with groups.prefill() as one, groups.prefill() as other, groups.decode(one, other) as engine:
        for prefill in (one, other):
            prefill.transport.faults.append(Fault.FAIL_TO_POST)
        with pytest.raises(TransferError) as caught:
            serve(engine, ASKS[:1])
        assert "as the test wants it" in str(caught.value)
        wait_until(lambda: is_at_start(engine))


def test_groups_of_different_width_share_a_prefill_at_the_same_time(
    groups: Groups, thread_engines: ThreadEngines
) -> None:
    """A52, B54: geometry travels with each request; one that is impossible disturbs none of the others."""
    sizes = [{}, {"tp_size": 2, "dcp_size": 2}, {"tp_size": 2, "dcp_size": 1}]
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(groups.prefill())
        engines = [stack.enter_context(groups.decode(prefill, **size)) for size in sizes]
        results: list[Any] = [None] * len(sizes)

        def generate(place: int) -> None:
            results[place] = [tokens(serve(engines[place], ASKS)) for _ in range(2)]

        threads = [threading.Thread(target=generate, args=(place,)) for place in range(len(sizes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(NEVER_S)
        for engine in engines:
            assert is_at_start(engine)
        wait_until(lambda: prefill.is_at_start)
    for size, result in zip(sizes, results, strict=True):
        plain = tokens(thread_engines.plain(ASKS, MODEL, **{"tp_size": 1, "dcp_size": 1, **size}))
        assert result == [plain, plain]


def test_a_pool_that_is_full_gives_every_request_its_text(groups: Groups, right: Any) -> None:
    """A10, A49: requests are preempted beside others that wait for their prompts, and come again."""
    asks = [Question(prompt_of(6 + 3 * place, seed=place), greedy(12)) for place in range(6)]
    with (
        groups.prefill(max_model_len=48) as prefill,
        groups.decode(prefill, max_model_len=48, num_pages=12, max_num_requests=4) as engine,
    ):
        prefill.transport.faults.extend([Fault.DELAY, None, None] * 6)
        assert tokens(serve(engine, asks)) == right(asks)
        assert is_at_start(engine)
        assert engine.intake is not None
        assert engine.intake.counts.num_started > len(asks)
        wait_until(lambda: prefill.is_at_start)


def test_a_server_that_is_stopped_tells_its_groups_and_frees_their_pages(groups: Groups) -> None:
    """A51: nobody has to find out by waiting."""
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        prefill.transport.faults.extend([Fault.HOLD] * 9)
        stream = engine.stream(ASKS[0].prompt, ASKS[0].params)
        wait_until(lambda: engine.step() and len(prefill.transport.writes) > 0)
        prefill.server.stop()
        with pytest.raises(TransferError, match="it is being shut down"):
            stream.result()
        wait_until(lambda: is_at_start(engine))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"page_size": 8}, "page_size of the decode group is 8, of the prefill 4: start both with one --page-size"),
        ({"kv_format": KvFormat.FP8_PACKED}, "kv_format of the decode group is fp8_packed, of the prefill float32"),
        ({"kv_format": KvFormat.FP8, "kv_scale": 0.5}, "kv_format of the decode group is fp8, of the prefill float32"),
        ({"latent_norm_eps": 1e-3}, "another rounding: start both with the same checkpoint, --dtype and"),
    ],
)
def test_a_group_whose_pages_differ_does_not_open(groups: Groups, settings: dict[str, Any], reason: str) -> None:
    with groups.prefill() as prefill, pytest.raises(ConfigError) as caught, groups.decode(prefill, **settings):
        pass
    assert reason in str(caught.value)


def test_a_group_that_drafts_needs_a_prefill_that_computes_draft_kv(
    groups: Groups, thread_engines: ThreadEngines
) -> None:
    with (
        thread_engines.open(
            MODEL, tp_size=1, dcp_size=1, transport="local", num_draft_tokens=0, with_draft=False
        ) as ranks,
        serving(ranks.engine()) as server,
        pytest.raises(ConfigError, match="drafts with the MTP layer, the prefill has none"),
        thread_engines.open(MODEL, tp_size=1, dcp_size=1, prefill=(server.address,)) as decode,
    ):
        decode.engine()


def test_peers_that_cannot_be_served_are_told_why_and_others_are_served_on(groups: Groups, right: Any) -> None:
    """A52, B53, B54: model, layout, protocol, transport; no thread ends."""
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        facts = prefill.engine.pool_facts
        for wrong, reason in (
            ({"facts": msgspec.structs.replace(facts, model="another")}, "different weights or another rounding"),
            ({"facts": msgspec.structs.replace(facts, target="another")}, "layouts of their pages differ"),
            ({"facts": msgspec.structs.replace(facts, draft="another")}, "has another one"),
            ({"facts": msgspec.structs.replace(facts, page_size=64)}, "--page-size"),
            ({"facts": msgspec.structs.replace(facts, memory="cuda")}, "start both with --device cuda"),
            ({"facts": facts, "protocol": PROTOCOL_VERSION + 1}, "run one version of specdec"),
            ({"facts": facts, "transport": "nixl"}, "--transport"),
        ):
            with call(prefill.address, **wrong) as wire:
                assert reason in wire.receive(Refused).reason
                wire.receive_end()
            assert tokens(serve(engine, ASKS[:1])) == right(ASKS[:1])


def test_words_out_of_turn_end_their_line_only(groups: Groups, right: Any) -> None:
    """B53: before Hello, twice, of another epoch, of the other side."""
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        facts = prefill.engine.pool_facts
        with call(prefill.address, facts=facts) as wire:
            epoch = wire.receive(Welcome).epoch
            names = {"transfer_id": 0, "decode_epoch": "e" * 32, "prefill_epoch": epoch}
            wire.send(Abort(**names))
            assert "another epoch" in wire.receive(Refused).reason
            wire.receive_end()
        with call(prefill.address, facts=facts) as wire:
            wire.receive(Welcome)
            wire.send(Welcome(epoch=epoch, processes=[]))
            assert "sends no Welcome" in wire.receive(Refused).reason
            wire.receive_end()
        assert tokens(serve(engine, ASKS)) == right(ASKS)


def test_a_hello_that_its_group_no_longer_waits_for_leaves_the_next_line_up(groups: Groups) -> None:
    """A53: it was late, and the group has called again meanwhile."""
    with groups.prefill() as prefill:
        facts = prefill.engine.pool_facts
        host, port = prefill.address.split(":")
        with (
            contextlib.closing(Wire(socket.create_connection((host, int(port))))) as early,
            call(prefill.address, facts=facts) as wire,
        ):
            names = {"transfer_id": 0, "decode_epoch": DECODE_EPOCH, "prefill_epoch": wire.receive(Welcome).epoch}
            early.send(Hello(protocol=PROTOCOL_VERSION, epoch=DECODE_EPOCH, transport="local", facts=facts))
            assert "has called again since" in early.receive(Refused).reason
            early.receive_end()
            wire.send(Ask(**names))
            assert wire.receive(Unknown).transfer_id == 0


def test_starts_that_cannot_be_served_fail_with_a_reason_and_nothing_else(groups: Groups, right: Any) -> None:
    """A52, B53: impossible geometry, pages, tokens, sizes; the line and the server go on."""
    with groups.prefill(max_model_len=64) as prefill, groups.decode(prefill, max_model_len=64) as engine:
        facts = prefill.engine.pool_facts
        place = Destination(
            facts=facts,
            tp_size=1,
            dcp_size=1,
            num_pages=4,
            page_ids=np.arange(4).tobytes(),
            addresses=[b"no address"],
        )
        prompt = np.arange(10, dtype=np.int32)
        impossible: list[tuple[dict[str, Any], dict[str, Any], str]] = [
            ({}, {"tp_size": 3, "dcp_size": 2, "addresses": [b"", b"", b""]}, "dcp_size must divide tp_size"),
            ({}, {"tp_size": 2, "dcp_size": 1}, "2 ranks have an address each, got 1"),
            ({}, {"tp_size": 4096, "dcp_size": 4096, "addresses": [b"a"] * 4096}, ""),
            ({}, {"page_ids": np.arange(2).tobytes()}, "do not fit into 2 pages"),
            ({}, {"page_ids": np.array([0, 1, 1, 2]).tobytes()}, "different from each other"),
            ({}, {"page_ids": np.array([0, 1, -1]).tobytes()}, "different from each other"),
            ({}, {"page_ids": np.array([0, 1, 4]).tobytes()}, "page ids must be below 4"),
            ({}, {"page_ids": np.array([0, 1, 1 << 62]).tobytes()}, "page ids must be below 4"),
            ({}, {"page_ids": bytes(9)}, "no whole number"),
            ({}, {"page_ids": b""}, "do not fit into 0 pages"),
            ({}, {"num_pages": 1 << 32, "page_ids": np.array([0, 1, (1 << 32) - 1]).tobytes()}, ""),
            ({}, {"facts": msgspec.structs.replace(facts, page_size=8)}, "page_size"),
            ({"token_ids": b""}, {}, "the prompt has 0 tokens"),
            ({"token_ids": bytes(7)}, {}, "no whole number"),
            ({"token_ids": np.full(9, 1 << 30, dtype=np.int32).tobytes()}, {}, "token ids must lie in"),
            ({"token_ids": np.full(9, -1, dtype=np.int32).tobytes()}, {}, "token ids must lie in"),
            ({"token_ids": np.zeros(65, dtype=np.int32).tobytes()}, {}, "--max-model-len"),
            ({"num_cached": 3}, {}, "whole pages of 4"),
            ({"num_cached": 12}, {}, "less than the 10"),
            ({}, {}, ""),  # whatever the transport says of that address
            ({}, {"addresses": [address_with(nbytes=1 << 63)]}, "the address of a peer cannot be read"),
            ({}, {"addresses": [address_with(nbytes=0)]}, "the address of a peer cannot be read"),
            ({}, {"addresses": [address_with(nbytes=1 << 50)]}, "cannot be mapped"),
            ({}, {"addresses": [address_with(base=1 << 62)]}, "cannot be mapped"),
            ({}, {"addresses": [address_with(name="another")]}, ""),
        ]
        with call(prefill.address, facts=facts) as wire:
            epoch = wire.receive(Welcome).epoch
            for transfer_id, (asked, of_place, reason) in enumerate(impossible):
                names = {"transfer_id": transfer_id, "decode_epoch": "d" * 32, "prefill_epoch": epoch}
                fields = {
                    "token_ids": prompt.tobytes(),
                    "num_cached": 0,
                    "cache_salt": b"",
                    "priority": 0,
                    "deadline_s": NEVER_S,
                    **asked,
                }
                destination = msgspec.structs.replace(place, **of_place)
                wire.send(Start(**names, destination=destination, **fields))
                while isinstance(message := wire.receive(Failed | Progress), Progress):  # type: ignore[arg-type]
                    pass
                assert message.transfer_id == transfer_id
                assert reason in message.reason
                assert wire.receive(Drained).transfer_id == transfer_id
                wire.send(Ask(**names))
                wire.receive(Drained)
        assert tokens(serve(engine, ASKS)) == right(ASKS)
        wait_until(lambda: prefill.is_at_start)


def address_with(*, name: str = "target.latent", nbytes: int = 4096, base: int = 0) -> bytes:
    """An address whose digest is right and whose region is none of ours."""
    region = RegionRecord(name=name, nbytes=nbytes, base=base)
    return encode_address(
        AddressRecord(
            version=ADDRESS_VERSION,
            transport="local",
            process=ProcessRecord.of_this_process(),
            endpoint=bytes(64),
            regions=(region,),
        )
    )


def test_a_start_of_an_earlier_epoch_or_after_its_abort_moves_nothing(groups: Groups, right: Any) -> None:
    """B52, A58: what was delayed past a restart, or past its own end, cannot write."""
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        facts = prefill.engine.pool_facts
        place = Destination(
            facts=facts, tp_size=1, dcp_size=1, num_pages=4, page_ids=np.arange(4).tobytes(), addresses=[b"nowhere"]
        )
        fields: dict[str, Any] = {
            "token_ids": bytes(40),
            "num_cached": 0,
            "cache_salt": b"",
            "priority": 0,
            "deadline_s": NEVER_S,
            "destination": place,
        }
        with call(prefill.address, facts=facts) as old, call(prefill.address, facts=facts) as new:
            epoch = new.receive(Welcome).epoch
            names: dict[str, Any] = {"transfer_id": 5, "decode_epoch": "d" * 32, "prefill_epoch": epoch}
            new.send(Start(**{**names, "prefill_epoch": "x" * 32}, **fields))
            assert "earlier process" in new.receive(Failed).reason
            new.receive(Drained)
            new.send(Abort(**names))
            new.receive(object)
            with contextlib.suppress(OSError):
                old.send(Start(**names, **fields))
            new.send(Start(**names, **fields), Start(**{**names, "transfer_id": 4}, **fields))
            assert [new.receive(Drained).transfer_id for _ in range(2)] == [5, 4]
        assert prefill.server.counts.num_started == 0
        assert prefill.transport.writes == []
        assert tokens(serve(engine, ASKS)) == right(ASKS)


def test_a_start_that_comes_twice_is_computed_once(groups: Groups) -> None:
    with groups.prefill() as prefill, groups.decode(prefill) as engine:
        facts = prefill.engine.pool_facts
        assert engine.intake is not None
        address = engine.core.ranks.addresses()
        place = Destination(
            facts=facts, tp_size=1, dcp_size=1, num_pages=4, page_ids=np.arange(4).tobytes(), addresses=address
        )
        with call(prefill.address, facts=facts) as wire:
            names = {"transfer_id": 0, "decode_epoch": "d" * 32, "prefill_epoch": wire.receive(Welcome).epoch}
            start = Start(
                **names,
                token_ids=bytes(40),
                num_cached=0,
                cache_salt=b"",
                priority=0,
                deadline_s=NEVER_S,
                destination=place,
            )
            wire.send(start, start)
            answers = []
            while len([each for each in answers if isinstance(each, Done)]) < 1:
                answers.append(wire.receive(object))
            wire.send(start, Abort(**names), Abort(**names))
            assert isinstance(wire.receive(object), Done)
            assert [wire.receive(Drained).transfer_id for _ in range(2)] == [0, 0]
        assert prefill.server.counts.num_started == 1
        wait_until(lambda: prefill.is_at_start)


def test_a_server_that_never_served_leaves_nothing_open(groups: Groups) -> None:
    with groups.prefill() as prefill:
        server = PrefillServer(prefill.engine)
        host, port = server.address.split(":")
        socket.create_connection((host, int(port))).close()
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
        with pytest.raises(ConfigError, match="cannot listen on"):
            PrefillServer(prefill.engine, listen=prefill.address)


def test_whatever_is_sent_to_the_door_others_are_served_on(groups: Groups, right: Any) -> None:
    """B53: random bytes, cut and flipped frames, huge lengths, half frames and silence, a peer that never reads."""
    generator = np.random.default_rng(0)
    with groups.prefill() as prefill, groups.decode(prefill) as engine, contextlib.ExitStack() as stack:
        host, port = prefill.address.split(":")
        whole = frame(encode(Refused(reason="x" * 100)))
        flipped = bytearray(whole)
        flipped[20] ^= 4
        said = [generator.bytes(int(size)) for size in generator.integers(1, 300, size=20)]
        said += [whole[:3], whole[:-1], bytes(flipped), b"", b"\xff" * 8, frame(bytes(1 << 26))[:12], whole * 200]
        for data in said:
            line = stack.enter_context(socket.create_connection((host, int(port))))
            line.sendall(data)  # and nothing more: it neither reads nor hangs up
        wire = stack.enter_context(call(prefill.address, facts=prefill.engine.pool_facts, epoch="f" * 32))
        names = {"transfer_id": 0, "decode_epoch": "f" * 32, "prefill_epoch": wire.receive(Welcome).epoch}
        for _ in range(2000):
            wire.send(Ask(**names))
        assert tokens(serve(engine, ASKS)) == right(ASKS)
