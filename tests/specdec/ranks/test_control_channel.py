"""Each end of the control channel notices that the other is gone, and neither waits for one that hangs."""

import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from specdec.errors import CollectiveError, RankError, RankLostError
from specdec.ranks.control_messages import End, Failed, Task
from specdec.ranks.follower_channel import FollowerChannel
from specdec.ranks.leader_channel import LeaderChannel

LONG_S = 60.0  # far above what anything here takes, on whatever machine
SHORT_S = 0.5
LARGE = Task("verify", "x" * (64 << 20))  # more than a line holds


@pytest.fixture
def pipes() -> Iterator[Callable[[], tuple[Connection, Connection]]]:
    """Makes connected pairs, and closes them at the end."""
    made: list[Connection] = []

    def make() -> tuple[Connection, Connection]:
        pair = Pipe()
        made.extend(pair)
        return pair

    yield make
    for connection in made:
        connection.close()


class Leader:
    """A leader's channel to raw connections, which do what the test wants."""

    def __init__(self, pipes: Callable[[], tuple[Connection, Connection]], *, size: int = 2, **settings: Any) -> None:
        pairs = {rank: pipes() for rank in range(1, size)}
        self.followers = {rank: follower for rank, (_, follower) in pairs.items()}
        self.channel = LeaderChannel({rank: leader for rank, (leader, _) in pairs.items()}, **settings)

    def await_loss(self) -> str:
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            try:
                self.channel.check()
            except RankLostError as lost:
                return str(lost)
            time.sleep(0.01)
        raise AssertionError("no loss was noticed")


def read(connection: Connection) -> object:
    """The next message that is no heartbeat."""
    while not (data := connection.recv_bytes()):
        pass
    return pickle.loads(data)


@contextmanager
def beating(connection: Connection) -> Iterator[None]:
    """A follower that gives signs of life and does nothing else."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(SHORT_S / 10):
            connection.send_bytes(b"")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Followed:
    """A follower's channel whose way out is noted instead of taken."""

    def __init__(self, pipes: Callable[[], tuple[Connection, Connection]], *, timeout_s: float) -> None:
        self.left: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.leader, connection = pipes()
        self.channel = FollowerChannel(connection, timeout_s=timeout_s, leave=self.left.put)


def test_tasks_arrive_in_order_and_the_end_after_them(pipes: Any) -> None:
    leader_end, follower_end = pipes()
    leader = LeaderChannel({1: leader_end}, timeout_s=LONG_S)
    follower = FollowerChannel(follower_end, timeout_s=LONG_S)
    for number in range(5):
        leader.broadcast(Task("verify", number))
    closing = threading.Thread(target=leader.close)
    closing.start()
    assert [follower.next_task() for _ in range(6)] == [*(Task("verify", number) for number in range(5)), None]
    follower.close()
    closing.join(LONG_S)
    assert not closing.is_alive()
    assert leader.loss is None


def test_task_larger_than_any_buffer_arrives_whole(pipes: Any) -> None:
    leader_end, follower_end = pipes()
    leader = LeaderChannel({1: leader_end}, timeout_s=LONG_S)
    follower = FollowerChannel(follower_end, timeout_s=LONG_S)
    leader.broadcast(LARGE)
    assert follower.next_task() == LARGE
    follower.close()
    leader.close()


def test_idle_group_stays_idle_for_many_timeouts(pipes: Any) -> None:
    leader_end, follower_end = pipes()
    left: list[str] = []
    leader = LeaderChannel({1: leader_end}, timeout_s=SHORT_S)
    follower = FollowerChannel(follower_end, timeout_s=SHORT_S, leave=left.append)
    time.sleep(6 * SHORT_S)
    leader.broadcast(Task("verify", 1))
    assert follower.next_task() == Task("verify", 1)
    assert left == []
    follower.close()
    leader.close()


def test_silent_follower_is_lost_and_named(pipes: Any) -> None:
    leader = Leader(pipes, size=3, timeout_s=SHORT_S)
    with beating(leader.followers[1]):
        lost = leader.await_loss()
    leader.channel.close()
    assert "rank 2 is gone: no sign of life for 0.5 s" in lost


def test_follower_that_hangs_up_is_lost_at_once(pipes: Any) -> None:
    leader = Leader(pipes, timeout_s=LONG_S, describe_end=lambda rank: f"process of {rank} was killed")
    leader.followers[1].close()
    assert leader.await_loss() == "rank 1 is gone: process of 1 was killed; start the engine again"
    with pytest.raises(RankLostError, match="process of 1"):
        leader.channel.broadcast(Task("verify", 0))
    leader.channel.close()


def test_follower_that_sends_what_cannot_be_read_is_lost(pipes: Any) -> None:
    leader = Leader(pipes, timeout_s=LONG_S)
    leader.followers[1].send_bytes(b"not a pickle")
    assert "UnpicklingError" in leader.await_loss()
    leader.channel.close()


def test_sending_to_a_follower_that_never_reads_ends(pipes: Any) -> None:
    """It hangs while a task fills its line; the sender is freed, and the others learn of the end."""
    leader = Leader(pipes, size=3, timeout_s=SHORT_S)
    with beating(leader.followers[2]):
        with pytest.raises(RankLostError, match="rank 1 is gone"):
            leader.channel.broadcast(LARGE)
        leader.channel.close()
    assert read(leader.followers[2]) == End(is_at_once=True)


def test_loss_frees_the_thread_that_sends_to_the_lost(pipes: Any) -> None:
    leader = Leader(pipes, timeout_s=LONG_S)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(leader.channel.broadcast, LARGE)
        time.sleep(0.1)
        leader.channel.lose(1, "stopped")
        with pytest.raises(RankLostError, match="stopped"):
            sent.result(LONG_S)
    leader.channel.close()


def test_task_that_cannot_be_sent_fails_alone(pipes: Any) -> None:
    leader_end, follower_end = pipes()
    leader = LeaderChannel({1: leader_end}, timeout_s=LONG_S)
    follower = FollowerChannel(follower_end, timeout_s=LONG_S)
    with pytest.raises(RankError, match="cannot run this pass"):
        leader.broadcast(Task("verify", lambda: None))  # a function without a name cannot be pickled
    leader.broadcast(Task("verify", 1))
    assert follower.next_task() == Task("verify", 1)
    follower.close()
    leader.close()


def test_cause_counts_more_than_its_consequences(pipes: Any) -> None:
    leader = Leader(pipes, size=4, timeout_s=LONG_S)
    leader.followers[2].send_bytes(pickle.dumps(Failed("a collective broke off", is_consequence=True)))
    leader.await_loss()
    cause = pickle.dumps(Failed("MemoryError", is_consequence=False))
    threading.Timer(0.2, leader.followers[3].send_bytes, (cause,)).start()
    assert "rank 3 is gone: MemoryError" in str(leader.channel.cause_of(CollectiveError("broken")))
    leader.channel.close()


def test_collective_that_one_living_rank_never_joined_names_that_rank(pipes: Any) -> None:
    leader = Leader(pipes, size=3, timeout_s=SHORT_S)
    leader.followers[1].send_bytes(pickle.dumps(Failed("a collective broke off", is_consequence=True)))
    with beating(leader.followers[2]):
        lost = leader.channel.cause_of(CollectiveError("timed out"))
    assert "rank 2 is gone: it did not leave a collective as the others did, nor say why; timed out" in str(lost)
    leader.channel.close()


def test_loading_ends_when_all_have_loaded(pipes: Any) -> None:
    pairs = [pipes(), pipes()]
    leader = LeaderChannel({rank: pair[0] for rank, pair in enumerate(pairs, 1)}, timeout_s=LONG_S)
    followers = [FollowerChannel(pair[1], timeout_s=LONG_S) for pair in pairs]
    followers[0].report_loaded(None)
    threading.Timer(0.1, lambda: followers[1].report_loaded("CheckpointError: damaged")).start()
    with pytest.raises(RankError, match="rank 2 could not load its share: CheckpointError: damaged"):
        leader.await_loaded()
    for follower in followers:
        follower.close()
    leader.close()


def test_loading_ends_when_a_rank_is_lost(pipes: Any) -> None:
    leader = Leader(pipes, size=3, timeout_s=LONG_S)
    threading.Timer(0.1, leader.followers[2].close).start()
    with pytest.raises(RankLostError, match="rank 2"):
        leader.channel.await_loaded()
    leader.channel.close()


def test_follower_leaves_when_the_leader_hangs_up(pipes: Any) -> None:
    follower = Followed(pipes, timeout_s=LONG_S)
    follower.leader.close()
    assert follower.left.get(timeout=LONG_S) == "the leading rank is gone"
    follower.channel.close()


def test_follower_leaves_when_the_leader_is_silent(pipes: Any) -> None:
    follower = Followed(pipes, timeout_s=SHORT_S)
    assert "no sign of life for 0.5 s" in follower.left.get(timeout=LONG_S)
    follower.channel.close()


def test_follower_leaves_in_the_middle_of_a_task_when_it_is_told_to(pipes: Any) -> None:
    follower = Followed(pipes, timeout_s=LONG_S)
    follower.leader.send_bytes(pickle.dumps(Task("verify", 0)))
    assert follower.channel.next_task() is not None
    follower.leader.send_bytes(pickle.dumps(End(is_at_once=True)))
    assert follower.left.get(timeout=LONG_S) == ""
    follower.channel.close()


def test_follower_that_cannot_read_a_task_says_so_and_leaves(pipes: Any) -> None:
    follower = Followed(pipes, timeout_s=LONG_S)
    follower.leader.send_bytes(b"not a pickle")
    assert "UnpicklingError" in follower.left.get(timeout=LONG_S)
    failed = read(follower.leader)
    assert isinstance(failed, Failed)
    assert not failed.is_consequence
    follower.channel.close()


def test_loss_may_be_noted_from_any_thread_once(pipes: Any) -> None:
    calls: list[int] = []
    leader = Leader(pipes, size=3, timeout_s=LONG_S, on_loss=lambda: calls.append(1))
    threads = [threading.Thread(target=leader.channel.lose, args=(1, f"cause {i}")) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    leader.channel.close()
    leader.channel.close()


def test_a_pass_that_does_not_end_is_a_loss_and_one_that_ends_is_none(
    pipes: Callable[[], tuple[Connection, Connection]],
) -> None:
    lost: list[bool] = []
    leader = Leader(pipes, timeout_s=SHORT_S, on_loss=lambda: lost.append(True))
    with beating(leader.followers[1]):
        for _ in range(3):
            with leader.channel.ending_soon():
                time.sleep(SHORT_S / 2)
        time.sleep(3 * SHORT_S)  # nothing runs, for as long as it likes
        leader.channel.check()
        with leader.channel.ending_soon():
            assert leader.await_loss() == "rank 1 is gone: it did not end a pass in 1 s; start the engine again"
    assert lost == [True]
    leader.channel.close()
