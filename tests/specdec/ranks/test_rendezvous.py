"""Only followers with the key and the leader's own versions come in, each once; everybody else is turned away."""

import socket
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection

import pytest

from specdec.errors import ConfigError, RankLostError
from specdec.ranks.place import Place, launched_place
from specdec.ranks.rendezvous import Dismissal, Door, Invitation, answer, decode_summons, encode_summons

KEY = bytes(range(32))
LONG_S = 60.0


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door("127.0.0.1")
    yield door
    door.close()


def invitation_to(door: Door, *, key: bytes = KEY) -> Invitation:
    return Invitation(host="127.0.0.1", port=door.port, key=key, timeout_s=1.0, group="g")


def admit(door: Door, *ranks: int, start_timeout_s: float = LONG_S) -> dict[int, Connection]:
    return door.admit(ranks, key=KEY, start_timeout_s=start_timeout_s, watch=lambda missing: None)


def test_followers_come_in_whatever_order(door: Door) -> None:
    with ThreadPoolExecutor() as pool:
        admitted = pool.submit(admit, door, 1, 2, 3)
        connections = {rank: answer(invitation_to(door), rank=rank) for rank in (3, 1, 2)}
        inside = admitted.result(LONG_S)
    assert set(inside) == {1, 2, 3}
    for rank, connection in connections.items():
        inside[rank].send_bytes(b"%d" % rank)
        assert connection.recv_bytes() == b"%d" % rank
        inside[rank].close()
        connection.close()


def test_strangers_do_not_keep_the_followers_out(door: Door) -> None:
    """One has another key, one speaks another protocol, one says a rank that is not missing."""
    with ThreadPoolExecutor() as pool:
        admitted = pool.submit(admit, door, 1, 2)
        with pytest.raises(RankLostError, match="no leading rank"):
            answer(invitation_to(door, key=bytes(32)), rank=1)
        with socket.create_connection(("127.0.0.1", door.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        first = answer(invitation_to(door), rank=1)
        for rank in (1, 7, 0, -1):
            with answer(invitation_to(door), rank=rank) as turned_away, pytest.raises(EOFError):
                turned_away.recv_bytes()
        second = answer(invitation_to(door), rank=2)
        inside = admitted.result(LONG_S)
    inside[1].send_bytes(b"first")
    assert first.recv_bytes() == b"first"
    for connection in (*inside.values(), first, second):
        connection.close()


@pytest.mark.parametrize(
    ("hello", "complaint"),
    [
        (
            b'{"type":"Hello","rank":1,"versions":{"specdec":"0.0"}}',
            r"rank 1 runs specdec 0\.0, rank 0 runs .*",
        ),
        (b'{"type":"Hello","rank":1,"name":"x","versions":{}}', r"first message cannot be read .*name"),
    ],
)
def test_other_versions_are_refused_with_both_named(door: Door, hello: bytes, complaint: str) -> None:
    with ThreadPoolExecutor() as pool:
        admitted = pool.submit(admit, door, 1)
        with Client(("127.0.0.1", door.port), authkey=KEY) as connection:
            connection.send_bytes(hello)
            with pytest.raises(ConfigError, match=complaint + ".*install the same versions"):
                admitted.result(LONG_S)


def test_followers_that_do_not_come_are_named(door: Door) -> None:
    with pytest.raises(RankLostError, match=r"ranks \[1, 2\] did not come within 0.2 s"):
        admit(door, 1, 2, start_timeout_s=0.2)


def test_waiting_ends_when_it_is_of_no_use(door: Door) -> None:
    def watch(missing: Collection[int]) -> None:
        raise RankLostError(f"{list(missing)} ended")

    with pytest.raises(RankLostError, match=r"\[1\] ended"):
        door.admit([1], key=KEY, start_timeout_s=LONG_S, watch=watch)


def test_closed_door_turns_followers_away() -> None:
    door = Door("127.0.0.1")
    invitation = invitation_to(door)
    door.close()
    with pytest.raises(RankLostError, match="rank 3 found no leading rank"):
        answer(invitation, rank=3)


def test_summons_survive_the_way_and_others_are_refused() -> None:
    invitation = Invitation(host="h", port=1, key=KEY, timeout_s=2.5, group="g")
    for summons in (invitation, Dismissal(exit_code=3)):
        assert decode_summons(encode_summons(summons)) == summons
    with pytest.raises(ConfigError, match="same versions"):
        decode_summons('{"type":"Invitation","host":"h"}')


def test_place_is_what_the_launcher_says() -> None:
    place = Place(rank=3, size=8, local_rank=1, host="node0", port=29500, has_store=True, attempt=2)
    assert launched_place(place.environ()) == place
    assert place.device("cuda") == "cuda:1"
    assert place.device("cpu") == "cpu"


@pytest.mark.parametrize("environ", [{}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "4"}])
def test_process_that_is_alone_has_no_place(environ: dict[str, str]) -> None:
    assert launched_place(environ) is None


@pytest.mark.parametrize("change", [{"MASTER_PORT": "x"}, {"MASTER_ADDR": None}, {"RANK": "first"}])
def test_broken_place_is_refused(change: dict[str, str | None]) -> None:
    place = Place(rank=0, size=2, local_rank=0, host="h", port=1, has_store=False)
    environ = {name: value for name, value in (place.environ() | change).items() if value is not None}
    with pytest.raises(ConfigError, match="start the ranks with torchrun"):
        launched_place(environ)
