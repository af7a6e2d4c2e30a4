"""What every transport does, between real processes: this one writes, two others are written to."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.errors import ConfigError, TransferError
from specdec.kernels.piece_repeats import Layers, Repeats
from specdec.transfer.address import AddressRecord, decode_address, encode_address
from specdec.transfer.descriptors import Descriptors
from specdec.transfer.transport import Peer, RegionCopies, Transport, WriteState, open_transport
from tests.support.gpu import needs_gpus
from tests.support.transfer_peer import POISON, PeerProcess, open_or_skip

pytestmark = [pytest.mark.xdist_group("transports")]  # one worker: its processes are shared by all tests of a transport

_REGIONS = {"odd": 1_000_003, "small": 4_099, "large": 32 << 20}
_WAIT_S = 30.0
_MOST = (1 << 31) - 1  # counts and steps of repeats


class Rig:
    """A writer in this process and two processes that it may write to."""

    def __init__(self, name: str, device: str, peer_device: str) -> None:
        self.name = name
        self.device = device
        self.writer = open_or_skip(name)
        self.source = make_source(self.writer, device)
        # They start together.
        self.first, self.second = (PeerProcess(name, _REGIONS, device=peer_device) for _ in range(2))
        self.first_peer = self.writer.connect(self.first.address)
        self.second_peer = self.writer.connect(self.second.address)

    @property
    def reaches_stopped_peers(self) -> bool:
        """Whether the memory of a stopped process takes writes: where nothing of it has to run for them."""
        return self.name == "local" or (self.name == "nixl" and self.device != "cpu")


def make_source(transport: Transport, device: str) -> dict[str, np.ndarray]:
    """Register source regions as large as the destinations, without the poison byte in them; gives their bytes."""
    generator = np.random.default_rng(0)
    values = {name: generator.integers(0, POISON, nbytes, np.uint8) for name, nbytes in _REGIONS.items()}
    try:
        transport.register({name: torch.from_numpy(array).to(device) for name, array in values.items()})
    except ConfigError as error:  # a build without CUDA
        transport.close()
        pytest.skip(str(error))
    return values


PLACES = [
    *(pytest.param((name, "cpu", "cpu"), id=name) for name in ("local", "mooncake", "nixl")),
    *(
        pytest.param((name, "cuda:0", f"cuda:{peer}"), id=f"{name}-{words}", marks=needs_gpus(1 + peer))
        for name in ("local", "mooncake", "nixl")
        for peer, words in ((0, "gpu"), (1, "gpus"))
    ),
]


@pytest.fixture(scope="module", params=PLACES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(*request.param)
    yield rig
    exit_code = rig.first.end()
    rig.second.end()
    rig.writer.close()
    assert exit_code == 0


@pytest.fixture(autouse=True)
def poisoned(request: pytest.FixtureRequest) -> None:
    if "rig" in request.fixturenames:
        rig: Rig = request.getfixturevalue("rig")
        for process in (rig.first, rig.second):
            if process.process.is_alive():
                process.ask("poison")


def scattered(
    generator: np.random.Generator, nbytes: int, lengths: np.ndarray, source_bytes: int | None = None
) -> Descriptors:
    """Ranges of these lengths at random places; in the destination disjoint, not touching, in random order."""
    gaps = np.diff(np.sort(generator.integers(0, nbytes - lengths.sum() - len(lengths), len(lengths))), prepend=0) + 1
    order = generator.permutation(len(lengths))
    ends = np.cumsum(gaps + lengths[order])
    destination = np.empty_like(lengths)
    destination[order] = ends - lengths[order]
    source = generator.integers(0, (source_bytes or nbytes) - lengths + 1)
    return Descriptors(source, destination, lengths)


def whole(rig: Rig, region: str) -> RegionCopies:
    zero = np.zeros(1, np.int64)
    return RegionCopies(region, region, Descriptors(zero, zero, np.array([_REGIONS[region]])))


def rows(region: str, source: list[int], destination: list[int], length: list[int]) -> RegionCopies:
    arrays = (np.array(values, np.int64) for values in (source, destination, length))
    return RegionCopies(region, region, Descriptors(*arrays))


def repeated(region: str, layers: tuple[int, int, int] = (2, 100, 100), **steps: int) -> RegionCopies:
    """Ten bytes from 5 to 7, as often and as far apart as the rest says."""
    place = {"count": 2, "source_step": 30, "destination_step": 10} | steps
    repeats = Repeats(*(np.array([place[name]]) for name in ("count", "source_step", "destination_step")))
    arrays = np.array([5]), np.array([7]), np.array([10])
    return RegionCopies(region, region, Descriptors(*arrays, repeats, Layers(*layers)))


def expected(rig: Rig, copies: list[RegionCopies], region: str) -> np.ndarray:
    """Poison, and one range after the other copied."""
    memory = np.full(_REGIONS[region], POISON, np.uint8)
    for copy in copies:
        if copy.destination_region == region:
            arrays = copy.descriptors.once()
            for start, to, size in zip(
                arrays.source_offset_X, arrays.destination_offset_X, arrays.length_X, strict=True
            ):
                memory[to : to + size] = rig.source[copy.source_region][start : start + size]
    return memory


def assert_lands(rig: Rig, process: PeerProcess, peer: Peer, copies: list[RegionCopies]) -> None:
    write = rig.writer.write(peer, copies)
    assert write.wait(_WAIT_S) is WriteState.DONE, write.error
    assert not write.may_land
    assert write.error is None
    for region in {copy.destination_region for copy in copies}:
        np.testing.assert_array_equal(process.read(region), expected(rig, copies, region))


def await_true(condition: Callable[[], bool], timeout_s: float = _WAIT_S) -> bool:
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("seed", range(3))
def test_scattered_ranges_land_and_their_neighbours_stay(rig: Rig, seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.choice([1, 2, 3, 63, 65, 656, 4_097, 40_961], 60)
    copies = [
        RegionCopies("odd", "odd", scattered(generator, _REGIONS["odd"] // 2, lengths[:40])),
        RegionCopies("large", "small", scattered(generator, _REGIONS["small"], np.array([1, 7, 128, 656]), 1 << 20)),
    ]
    assert_lands(rig, rig.first, rig.first_peer, copies)


def test_first_and_last_byte_of_a_region_can_be_written(rig: Rig) -> None:
    last = _REGIONS["odd"] - 1
    assert_lands(rig, rig.first, rig.first_peer, [rows("odd", [last, 0], [0, last], [1, 1])])


def test_a_region_is_written_whole(rig: Rig) -> None:
    assert_lands(rig, rig.second, rig.second_peer, [whole(rig, "odd")])


def test_nothing_is_done_at_once(rig: Rig) -> None:
    for copies in ([], [rows("odd", [], [], [])]):
        write = rig.writer.write(rig.first_peer, copies)
        assert write.wait(_WAIT_S) is WriteState.DONE
        assert not write.may_land


def test_more_small_descriptors_than_a_session_bears_at_once(rig: Rig) -> None:
    lengths = np.full(5_000, 7)
    copies = [RegionCopies("odd", "odd", scattered(np.random.default_rng(5), _REGIONS["odd"], lengths))]
    assert_lands(rig, rig.first, rig.first_peer, copies)


def test_many_different_lengths(rig: Rig) -> None:
    lengths = np.random.default_rng(6).permutation(np.arange(1, 1_200))
    copies = [RegionCopies("odd", "odd", scattered(np.random.default_rng(7), _REGIONS["odd"], lengths))]
    assert_lands(rig, rig.first, rig.first_peer, copies)


@pytest.mark.parametrize(
    ("copies", "named"),
    [
        (rows("odd", [0, 1_000_000], [0, 0], [1, 4]), "1000000"),  # past the source's end
        (rows("odd", [0, 0], [0, 1_000_003], [1, 1]), "1000003"),
        (rows("odd", [0, 0], [0, -1], [1, 1]), "-1"),
        (rows("odd", [0, -1], [0, 0], [1, 1]), "-1"),
        (rows("odd", [0, 0], [0, 5], [1, -1]), "-1 bytes"),
        (rows("odd", [0, 0], [0, (1 << 63) - 1], [1, 1 << 62]), "outside"),
        (rows("unknown", [0], [0], [1]), "unknown"),
        (RegionCopies("odd", "unknown", rows("odd", [0], [0], [1]).descriptors), "unknown"),
        (rows("odd", [0, 1], [0], [1]), "as many"),
        (repeated("odd", source_step=1_000_000), "offset 5"),
        (repeated("odd", destination_step=1_000_000), "offset 7"),
        (repeated("odd", count=100_000_000), "offset 5"),
        (repeated("odd", count=-1), "counts and steps"),
        (repeated("odd", source_step=-1), "counts and steps"),
        (repeated("odd", count=(1 << 31), destination_step=1 << 31), "counts and steps"),
        (repeated("odd", layers=(2, 1_000_000, 0)), "offset 5"),
        (repeated("odd", layers=(2, 0, 1_000_000)), "offset 7"),
        (
            repeated("odd", layers=(65_535, (1 << 46) - 1, 0), count=(1 << 31) - 1, source_step=(1 << 31) - 1),
            "offset 5",
        ),
        (repeated("odd", layers=(0, 0, 0)), "layers can be copied"),
        (repeated("odd", layers=(2, -1, 0)), "layers can be copied"),
        (repeated("odd", layers=(65_536, 0, 0)), "layers can be copied"),
        (RegionCopies("odd", "odd", Descriptors(np.zeros(1), np.zeros(1, np.int64), np.ones(1, np.int64))), "i64"),
    ],
)
def test_what_is_outside_of_a_region_is_refused_before_anything_is_sent(
    rig: Rig, copies: RegionCopies, named: str
) -> None:
    with pytest.raises(TransferError, match=named):
        rig.writer.write(rig.first_peer, [whole(rig, "small"), copies])
    assert rig.first.ask("num_fresh", "odd") == rig.first.ask("num_fresh", "small") == 0


@pytest.mark.parametrize(("length", "step"), [(656, 16), (132, 4), (1, 1), (2100, 1)])
def test_repeats_land_row_by_row_in_every_layer(rig: Rig, length: int, step: int) -> None:
    generator = np.random.default_rng(length)
    count_X = generator.integers(1, 30, 12)
    source_step_X = -(-length // step) * step + step * generator.integers(0, 9, 12)
    step_X = np.where(generator.random(12) < 0.5, length, source_step_X)
    room_X = -(-((count_X - 1) * step_X + length + 300) // step) * step
    destination_X = np.cumsum(room_X) - room_X
    source_X = generator.integers(0, (1_000_000 - count_X * source_step_X) // step) * step
    layers = Layers(3, 1_000_032, (int(room_X.sum()) + 255) // 128 * 128 + step)
    copies = Descriptors(source_X, destination_X, np.full(12, length), Repeats(count_X, source_step_X, step_X), layers)
    assert_lands(rig, rig.first, rig.first_peer, [whole(rig, "small"), RegionCopies("large", "large", copies)])


def test_writes_to_two_peers_at_once(rig: Rig) -> None:
    generator = np.random.default_rng(9)
    plans = [[RegionCopies("odd", "odd", scattered(generator, _REGIONS["odd"], np.full(300, 1_111)))] for _ in range(2)]
    writes = [
        rig.writer.write(peer, copies)
        for _ in range(4)
        for peer, copies in zip((rig.first_peer, rig.second_peer), plans, strict=True)
    ]
    for write in writes:
        assert write.wait(_WAIT_S) is WriteState.DONE, write.error
    for process, copies in zip((rig.first, rig.second), plans, strict=True):
        np.testing.assert_array_equal(process.read("odd"), expected(rig, copies, "odd"))


def test_writes_to_one_peer_land_in_order(rig: Rig) -> None:
    copies = [rows("small", [start], [100], [3_000]) for start in range(40)]
    writes = [rig.writer.write(rig.first_peer, [copy]) for copy in copies]
    assert [write.wait(_WAIT_S) for write in writes] == [WriteState.DONE] * 40
    np.testing.assert_array_equal(rig.first.read("small"), expected(rig, copies, "small"))


def test_any_thread_may_write(rig: Rig) -> None:
    copies = [rows("odd", [start], [100_000 * start], [99_000]) for start in range(8)]
    states = []

    def send(copy: RegionCopies) -> None:
        states.append(rig.writer.write(rig.first_peer, [copy]).wait(_WAIT_S))

    threads = [threading.Thread(target=send, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == [WriteState.DONE] * 8
    np.testing.assert_array_equal(rig.first.read("odd"), expected(rig, copies, "odd"))


def test_an_address_that_was_given_twice_is_one_peer(rig: Rig) -> None:
    assert rig.writer.connect(rig.first.address) is rig.first_peer


def test_a_cancelled_write_posts_nothing_more(rig: Rig) -> None:
    running = rig.writer.write(rig.first_peer, [whole(rig, "large")])
    waiting = rig.writer.write(rig.first_peer, [whole(rig, "small")])
    waiting.cancel()
    assert (waiting.state, waiting.error, waiting.may_land) == (WriteState.FAILED, "cancelled", False)
    running.cancel()
    if running.wait(_WAIT_S) is WriteState.FAILED:
        assert running.error == "cancelled"
    assert not running.may_land
    assert rig.first.ask("num_fresh", "small") == 0


def test_a_damaged_address_is_refused_and_the_good_one_stays_good(rig: Rig) -> None:
    good = rig.first.address
    places = np.random.default_rng(2).integers(0, len(good), 40)
    damaged = [good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :] for place in places.tolist()]
    for address in (*damaged, b"", good[:10], good[:-1], good + b"\0"):
        with pytest.raises(TransferError, match="damaged"):
            rig.writer.connect(address)
    assert_lands(rig, rig.first, rig.first_peer, [whole(rig, "small")])


def test_an_address_of_another_transport_or_version_is_refused(rig: Rig) -> None:
    record = decode_address(rig.first.address, transport=rig.name)
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    for change in ({"transport": "carrier-pigeon"}, {"version": record.version + 1}):
        with pytest.raises(TransferError, match="cannot reach"):
            rig.writer.connect(encode_address(AddressRecord(**(fields | change))))


def test_only_memory_of_the_host_and_of_gpus_is_taken(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="host"):
        rig.writer.allocate(8, device="meta")
    with pytest.raises(ConfigError, match="at least 1"):
        rig.writer.allocate(0)


def test_regions_are_registered_once_and_disjoint(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="once"):
        rig.writer.register({"more": torch.zeros(8)})
    memory = torch.zeros(64, dtype=torch.uint8)
    transport = open_transport(rig.name)
    try:
        with pytest.raises(ConfigError, match="first"):
            transport.address()
        for regions in (
            {},
            {"a": memory, "b": memory[8:]},
            {"strided": memory[::2]},
            {"empty": memory[:0]},
            {"elsewhere": torch.empty(8, device="meta")},
        ):
            with pytest.raises(ConfigError):
                transport.register(regions)
        transport.register({"a": memory[:8], "b": memory[8:]})
        assert len(transport.address()) > 0
    finally:
        transport.close()


def test_closing_ends_running_writes_and_leaves_nothing_behind(rig: Rig) -> None:
    def open_write_close() -> None:
        transport = open_transport(rig.name)
        make_source(transport, rig.device)
        peer = transport.connect(rig.first.address)
        before = transport.write(peer, [whole(rig, "small")])
        assert before.wait(_WAIT_S) is WriteState.DONE
        writes = [transport.write(peer, [whole(rig, "large")]) for _ in range(50)]
        transport.close()
        assert writes[-1].state is WriteState.FAILED
        assert "closed" in str(writes[-1].error)
        assert not writes[-1].may_land
        assert all(write.state is not WriteState.RUNNING for write in writes)
        with pytest.raises(TransferError, match="closed"):
            transport.connect(rig.first.address)
        with pytest.raises(TransferError, match="not connected"):
            transport.write(peer, [])
        transport.close()

    def held() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))

    open_write_close()  # what a library keeps for good, it has now
    before = held()
    open_write_close()
    assert await_true(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), 10.0), held()


def test_a_peer_can_be_disconnected_and_connected_again(rig: Rig) -> None:
    rig.writer.disconnect(rig.second_peer)
    with pytest.raises(TransferError, match="not connected"):
        rig.writer.write(rig.second_peer, [whole(rig, "small")])
    rig.second_peer = rig.writer.connect(rig.second.address)
    assert_lands(rig, rig.second, rig.second_peer, [whole(rig, "small")])


def test_a_peer_that_opens_again_has_a_new_address_and_the_old_one_fails(rig: Rig) -> None:
    old_peer, old_address = rig.second_peer, rig.second.address
    new_peer = rig.writer.connect(rig.second.reopen())
    rig.second_peer = new_peer
    late = rig.writer.write(old_peer, [whole(rig, "small")])
    assert late.wait(_WAIT_S) is WriteState.FAILED
    assert rig.second.ask("num_fresh", "small") == 0
    assert_lands(rig, rig.second, new_peer, [whole(rig, "small")])
    assert new_peer is not old_peer
    rig.writer.disconnect(old_peer)
    try:
        again = rig.writer.connect(old_address)
    except TransferError:
        return
    assert rig.name != "local"  # the others may find out by the first write
    assert rig.writer.write(again, [whole(rig, "small")]).wait(_WAIT_S) is WriteState.FAILED
    rig.writer.disconnect(again)


def test_a_stopped_peer_times_out_and_what_was_posted_lands_when_it_goes_on(rig: Rig) -> None:
    timeout_s = 1.0
    transport = open_transport(rig.name, timeout_s=timeout_s)
    try:
        make_source(transport, rig.device)
        peer = transport.connect(rig.second.address)
        assert transport.write(peer, [whole(rig, "small")]).wait(_WAIT_S) is WriteState.DONE
        with rig.second.stopped():
            write = transport.write(peer, [whole(rig, "large")])
            behind = transport.write(peer, [whole(rig, "odd")])
            if rig.reaches_stopped_peers:
                assert write.wait(_WAIT_S) is WriteState.DONE
                assert behind.wait(_WAIT_S) is WriteState.DONE
            else:
                assert write.wait(_WAIT_S) is WriteState.FAILED
                assert f"{timeout_s:g} s" in str(write.error)
                assert write.may_land
                assert behind.wait(_WAIT_S) is WriteState.FAILED
                assert not behind.may_land
                other = rig.writer.write(rig.first_peer, [whole(rig, "small")])
                assert other.wait(_WAIT_S) is WriteState.DONE  # nobody else is held up
        assert await_true(lambda: not write.may_land)
        assert rig.second.ask("num_fresh", "large") == _REGIONS["large"]
        assert write.state is (WriteState.DONE if rig.reaches_stopped_peers else WriteState.FAILED)
        assert transport.write(peer, [whole(rig, "odd")]).wait(_WAIT_S) is WriteState.DONE
    finally:
        transport.close()


def test_closing_does_not_wait_for_a_stopped_peer(rig: Rig) -> None:
    transport = open_transport(rig.name)
    make_source(transport, rig.device)
    peer = transport.connect(rig.second.address)
    assert transport.write(peer, [whole(rig, "small")]).wait(_WAIT_S) is WriteState.DONE
    with rig.second.stopped():
        write = transport.write(peer, [whole(rig, "large")])
        waiting = transport.write(peer, [whole(rig, "small")])
        assert await_true(lambda: write.may_land or write.state is WriteState.DONE)
        transport.close()
        if rig.reaches_stopped_peers:
            assert write.state is WriteState.DONE
        else:
            assert (write.state, write.may_land) == (WriteState.FAILED, True)
            assert (waiting.state, waiting.may_land) == (WriteState.FAILED, False)


def test_a_peer_killed_in_a_write_fails_it_and_later_ones_with_the_reason(rig: Rig) -> None:
    assert rig.writer.write(rig.second_peer, [whole(rig, "small")]).wait(_WAIT_S) is WriteState.DONE
    writes = [rig.writer.write(rig.second_peer, [whole(rig, "large")]) for _ in range(400)]
    rig.second.kill()
    for write in writes:
        assert write.wait(_WAIT_S) is not WriteState.RUNNING
        assert not write.may_land
    assert writes[-1].state is WriteState.FAILED
    assert "has ended" in str(writes[-1].error)
    later = rig.writer.write(rig.second_peer, [whole(rig, "small")])
    assert later.wait(1.0) is WriteState.FAILED
    assert "has ended" in str(later.error)
    assert not later.may_land
    rig.writer.disconnect(rig.second_peer)
    with pytest.raises(TransferError, match="has ended"):
        rig.writer.connect(rig.second.address)
    assert_lands(rig, rig.first, rig.first_peer, [whole(rig, "odd")])


def test_unknown_transports_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        open_transport("carrier-pigeon")
    with pytest.raises(ConfigError, match="lanes"):
        open_transport("local", lanes=4)
    with pytest.raises(ConfigError, match="timeout_s"):
        open_transport("local", timeout_s=0.0)


def test_local_memory_that_cannot_be_mapped_is_a_source_only() -> None:
    with open_transport("local") as target, open_transport("local") as writer:  # both in this process
        shared = target.allocate(100)
        target.register({"shared": shared, "own": torch.zeros(100)})
        writer.register({"own": torch.arange(100, dtype=torch.uint8)})
        peer = writer.connect(target.address())
        copies = rows("own", [0], [0], [100]).descriptors
        with pytest.raises(TransferError, match="'own'"):
            writer.write(peer, [RegionCopies("own", "own", copies)])
        assert writer.write(peer, [RegionCopies("own", "shared", copies)]).wait(_WAIT_S) is WriteState.DONE
        assert shared.tolist() == list(range(100))


def test_a_process_with_every_library_loaded_ends_with_zero_and_keeps_its_output_clean() -> None:
    for name in ("mooncake", "nixl"):
        open_or_skip(name).close()
    program = (
        "from specdec.transfer.transport import open_transport\n"
        "opened = [open_transport(name) for name in ('local', 'mooncake', 'nixl')]\n"
        "for transport in opened:\n"
        "    transport.register({'memory': transport.allocate(4096)})\n"
    )
    programs = (program, program + "    transport.close()\n")  # what is not closed must not crash the end either
    root = Path(__file__).parents[2]
    ended = [
        subprocess.Popen(
            [sys.executable, "-c", text], cwd=root, env=os.environ | {"UCX_LOG_LEVEL": "info"}, stdout=subprocess.PIPE
        )
        for text in programs
    ]
    assert [process.communicate(timeout=60)[0] for process in ended] == [b"", b""]
    assert [process.returncode for process in ended] == [0, 0]
