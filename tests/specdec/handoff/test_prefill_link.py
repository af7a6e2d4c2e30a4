"""What a decode group takes for certain about a prefill, whatever is lost, repeated, late or of another time.

The prefill is a script. Tags such as B49 are explained in `tests/INVARIANTS.md`.
"""

import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdec.handoff import prefill_link
from specdec.handoff.prefill_link import Arrived, Ended, Freed, LinkEvent, LinkState, PrefillLink
from specdec.transfer.address import ProcessRecord
from specdec.transfer.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Ask,
    Destination,
    Done,
    Drained,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Progress,
    Refused,
    Start,
    Unknown,
    Welcome,
)
from tests.support.scripted_prefill import (
    DECODE_EPOCH,
    FACTS,
    NEXT_EPOCH,
    PREFILL_EPOCH,
    WAIT_S,
    ScriptedPrefill,
    Wire,
    names_of,
)

DESTINATION = Destination(facts=FACTS, tp_size=1, dcp_size=1, num_pages=8, page_ids=bytes(8), addresses=[b"here"])
SHORT_GRACE_S = 0.3
LONG_S = 600.0


class Rig:
    """A scripted prefill and a link to it."""

    def __init__(self) -> None:
        self.prefill = ScriptedPrefill()
        self.events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self.writers: list[ProcessRecord] = []
        self._links: list[PrefillLink] = []

    def link(self, *, peer_timeout_s: float = LONG_S, address: str | None = None) -> PrefillLink:
        link = PrefillLink(
            address or self.prefill.address,
            epoch=DECODE_EPOCH,
            transport="local",
            facts=FACTS,
            peer_timeout_s=peer_timeout_s,
            on_event=self.events.put,
        )
        self._links.append(link)
        return link

    def ready(self, **settings: float) -> tuple[PrefillLink, Wire]:
        """A link that is ready, and the prefill's end of it."""
        link = self.link(**settings)
        wire = self.prefill.welcome(processes=self.writers)
        link.await_first_answer(WAIT_S)
        assert link.state is LinkState.READY
        return link, wire

    def started(self, transfer_id: int = 0, **settings: float) -> tuple[PrefillLink, Wire, Start]:
        """A link with a transfer that the prefill was given."""
        link, wire = self.ready(**settings)
        start(link, transfer_id)
        return link, wire, wire.receive(Start)

    def event(self) -> LinkEvent:
        return self.events.get(timeout=WAIT_S)

    def restart(self) -> None:
        """End the prefill's process, as far as the network shows it, and begin another at its address."""
        port = self.prefill.port
        self.prefill.close()
        self.prefill = ScriptedPrefill(port=port)

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.prefill.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def start(link: PrefillLink, transfer_id: int = 0, *, deadline_s: float = LONG_S, **asked: Any) -> None:
    link.start(
        transfer_id,
        **{
            "token_ids": bytes(4 * 5),
            "num_cached": 0,
            "num_computed": 0,
            "cache_salt": b"salt",
            "priority": 2,
            "destination": DESTINATION,
            "deadline_s": deadline_s,
            **asked,
        },
    )


def done(told: Start, **changed: Any) -> Done:
    fields = {"start_digest": bytes(16), "num_tokens": {"target.latent": 5}, "hidden": bytes(8), "num_cached": 0}
    return Done(**{**names_of(told), **fields, **changed})  # type: ignore[arg-type]


def of(kind: Callable[..., Message], told: Start, **fields: Any) -> Message:
    return kind(**{**names_of(told), **fields})


def failed(told: Start) -> Message:
    return of(Failed, told, reason="it is broken", is_retryable=True)


def meanwhile(rig: Rig, link: PrefillLink, wire: Wire) -> None:
    """Wait until everything sent so far was acted on, and find that there was no event."""
    before = link.counts.num_stale
    wire.send(Drained(transfer_id=99, decode_epoch=DECODE_EPOCH, prefill_epoch=PREFILL_EPOCH))
    while link.counts.num_stale == before:
        pass
    assert rig.events.empty()


def test_a_prompt_is_given_away_and_its_arrival_noted(rig: Rig) -> None:
    link, wire, told = rig.started(7)
    assert told == Start(
        transfer_id=7,
        decode_epoch=DECODE_EPOCH,
        prefill_epoch=PREFILL_EPOCH,
        token_ids=bytes(20),
        num_cached=0,
        cache_salt=b"salt",
        priority=2,
        destination=DESTINATION,
        deadline_s=told.deadline_s,
    )
    assert 0 < told.deadline_s <= LONG_S
    assert link.num_tokens == 5
    wire.send(of(Progress, told, num_computed=4), done(told))
    assert rig.event() == Arrived(7, done(told))
    assert (link.num_tokens, link.num_held) == (0, 0)


def test_a_failure_ends_it_and_frees_nothing_before_it_has_drained(rig: Rig) -> None:
    """B47, B51: what failed may still be written."""
    link, wire, told = rig.started()
    wire.send(failed(told))
    assert rig.event() == Ended(0, f"prefill {rig.prefill.address}: it is broken", is_retryable=True)
    assert wire.receive(Abort).transfer_id == 0
    meanwhile(rig, link, wire)
    assert link.num_held == 1
    wire.send(of(Drained, told))
    assert rig.event() == Freed(0)
    assert link.num_held == 0


@pytest.mark.parametrize("kind", ["done", "failed", "drained", "unknown"])
def test_a_message_that_comes_twice_counts_once(rig: Rig, kind: str) -> None:
    """A53: one event for each, whatever is repeated."""
    link, wire, told = rig.started()
    match kind:
        case "done":
            wire.send(done(told), done(told))
            assert isinstance(rig.event(), Arrived)
        case "failed":
            wire.send(failed(told), failed(told))
            assert isinstance(rig.event(), Ended)
            meanwhile(rig, link, wire)
            wire.send(of(Drained, told))
            assert rig.event() == Freed(0)
        case "drained":
            wire.send(failed(told), of(Drained, told), of(Drained, told))
            assert isinstance(rig.event(), Ended)
            assert rig.event() == Freed(0)
        case "unknown":
            wire.send(of(Unknown, told), of(Unknown, told))
            assert [wire.receive(Start).transfer_id for _ in range(2)] == [0, 0]
            wire.send(done(told))
            assert isinstance(rig.event(), Arrived)
    meanwhile(rig, link, wire)


def test_a_lost_start_is_sent_again(rig: Rig) -> None:
    """A53: the group asks, and a prefill that never heard of it is told again."""
    _, wire, told = rig.started()
    assert wire.receive(Ask).transfer_id == 0
    wire.send(of(Unknown, told))
    again = wire.receive(Start)
    assert msgspec.structs.replace(again, deadline_s=told.deadline_s) == told
    assert again.deadline_s < told.deadline_s
    wire.send(done(again))
    assert isinstance(rig.event(), Arrived)


def test_a_lost_answer_is_asked_for(rig: Rig) -> None:
    """A53: of `Done`, `Failed` and `Drained`, the one that holds is the answer to the question."""
    link, wire, first = rig.started(0)
    start(link, 1)
    start(link, 2)
    told = [first, wire.receive(Start), wire.receive(Start)]
    answers = [done(told[0]), failed(told[1]), of(Drained, told[2])]
    for _ in told:
        wire.send(answers[wire.receive(Ask).transfer_id])
    events = [rig.event() for _ in range(4)]
    assert {(type(event), event.transfer_id) for event in events} == {(Arrived, 0), (Ended, 1), (Ended, 2), (Freed, 2)}


def test_an_abort_is_repeated_until_it_is_answered(rig: Rig) -> None:
    """B50, A53: no answer is lost for good."""
    link, wire, told = rig.started()
    link.abort(0)
    link.abort(0)
    for _ in range(3):
        assert wire.receive(Abort).transfer_id == 0
    assert rig.events.empty()
    wire.send(of(Drained, told))
    assert rig.event() == Freed(0)
    link.abort(0)
    meanwhile(rig, link, wire)


@pytest.mark.parametrize("answer", [Drained, Unknown, done])
def test_every_answer_that_says_that_nothing_comes_any_more_frees(rig: Rig, answer: Callable[..., Message]) -> None:
    link, wire, told = rig.started()
    link.abort(0)
    wire.send(failed(told), done(told) if answer is done else of(answer, told))
    assert rig.event() == Freed(0)
    meanwhile(rig, link, wire)


def test_words_of_another_epoch_or_line_are_not_heard(rig: Rig) -> None:
    """B52, A58: neither another process's `Done` nor one for another group changes anything."""
    link, wire, told = rig.started()
    other = {"prefill_epoch": NEXT_EPOCH}, {"decode_epoch": NEXT_EPOCH}, {"transfer_id": 5}
    for wrong in other:
        for message in (done(told), failed(told), of(Drained, told), of(Unknown, told)):
            wire.send(msgspec.structs.replace(message, **wrong))
    deadline = time.monotonic() + 60
    while link.counts.num_stale < 3 * 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert rig.events.empty()
    wire.send(done(told))
    assert isinstance(rig.event(), Arrived)


@pytest.mark.parametrize("message", [Heartbeat, Hello, Start, Abort])
def test_a_peer_that_is_no_prefill_is_hung_up_on(rig: Rig, message: Callable[..., Message]) -> None:
    link, wire, told = rig.started()
    match message:
        case _ if message is Heartbeat:
            wire.connection.sendall(b"\xff" * 12)
        case _ if message is Hello:
            wire.send(Hello(protocol=1, epoch=NEXT_EPOCH, transport="local", facts=FACTS))
        case _:
            wire.send(told if message is Start else of(Abort, told))
    ended = rig.event()
    assert isinstance(ended, Ended)
    assert ended.is_retryable
    wire.receive_end()
    rig.prefill.welcome()
    link.await_first_answer(WAIT_S)


def test_what_does_not_come_in_time_is_given_up(rig: Rig) -> None:
    """B49: the request ends with its deadline, the pages with the writer."""
    link, wire = rig.ready()
    start(link, deadline_s=0.2)
    told = wire.receive(Start)
    ended = rig.event()
    assert isinstance(ended, Ended)
    assert (ended.is_retryable, "in time" in ended.reason) == (False, True)
    assert wire.receive(Abort).transfer_id == 0
    meanwhile(rig, link, wire)
    wire.send(of(Drained, told))
    assert rig.event() == Freed(0)


def test_a_silent_prefill_is_given_nothing_until_it_is_heard_again(rig: Rig) -> None:
    link, wire, told = rig.started(peer_timeout_s=0.3)
    ended = rig.event()
    assert isinstance(ended, Ended)
    assert (ended.is_retryable, "no sign of life" in ended.reason) == (True, True)
    assert link.state is LinkState.SILENT
    start(link, 1)
    assert [type(rig.event()) for _ in range(2)] == [Ended, Freed]
    assert link.num_held == 1
    wire.beat()
    while link.state is not LinkState.READY:
        wire.beat()
    wire.send(of(Drained, told))
    assert rig.event() == Freed(0)


def test_time_in_which_this_process_was_stopped_is_no_silence(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    link, wire, _ = rig.started(peer_timeout_s=50.0)
    clock = JumpingClock()
    monkeypatch.setattr(prefill_link, "time", clock)
    for _ in range(3):
        clock.offset_s += 100.0
        assert wire.receive(Ask).transfer_id == 0
    assert link.state is LinkState.READY
    assert rig.events.empty()


class JumpingClock:
    offset_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.offset_s


def test_what_a_prefill_has_computed_is_not_left_to_do(rig: Rig) -> None:
    link, wire = rig.ready()
    start(link, token_ids=bytes(4 * 50), num_cached=40, num_computed=8)
    told = wire.receive(Start)
    assert link.num_tokens == 42  # it computes what the group has too, unless it has it itself
    wire.send(of(Progress, told, num_computed=4))
    meanwhile(rig, link, wire)
    assert link.num_tokens == 42
    wire.send(of(Progress, told, num_computed=30))
    meanwhile(rig, link, wire)
    assert link.num_tokens == 20


def test_memory_is_not_free_while_a_rank_of_the_dead_prefill_lives(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that was stopped when its leader was killed may still write once it goes on."""
    monkeypatch.setattr(prefill_link, "DEAD_WRITER_GRACE_S", 0.05)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as follower:
        record = msgspec.structs.replace(
            ProcessRecord.of_this_process(), pid=follower.pid, start_time=process_start_time(follower.pid)
        )
        rig.writers = [record, msgspec.structs.replace(record, host="another", pid=1)]
        link, _, _ = rig.started()
        rig.restart()
        assert isinstance(rig.event(), Ended)
        rig.writers = []
        wire = rig.prefill.welcome(epoch=NEXT_EPOCH)
        while link.state is not LinkState.READY:
            pass
        start(link, 1)
        wire.receive(Start)
        for _ in range(2):
            wire.receive(Ask)  # of the second, a second later each
        assert rig.events.empty()
        follower.kill()
    assert rig.event() == Freed(0)


def process_start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_broken_line_ends_transfers_and_frees_nothing(rig: Rig) -> None:
    """B47: the process that lost its line may still write; the one that answers next says whether it is the same."""
    link, wire, told = rig.started()
    wire.close()
    ended = rig.event()
    assert isinstance(ended, Ended)
    assert ended.is_retryable
    wire = rig.prefill.welcome()
    assert wire.receive(Abort).transfer_id == 0
    meanwhile(rig, link, wire)
    wire.send(of(Drained, told))
    assert rig.event() == Freed(0)
    assert link.counts.num_connections == 2


def test_another_process_at_the_address_frees_what_the_first_was_given(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B49, A58: an earlier process is gone once another answers; its last bytes have a moment to arrive."""
    monkeypatch.setattr(prefill_link, "DEAD_WRITER_GRACE_S", SHORT_GRACE_S)
    link, _, told = rig.started()
    rig.restart()
    assert isinstance(rig.event(), Ended)
    wire = rig.prefill.welcome(epoch=NEXT_EPOCH)
    assert rig.event() == Freed(0)
    start(link, 1)
    assert wire.receive(Start).prefill_epoch == NEXT_EPOCH
    wire.send(done(msgspec.structs.replace(told, transfer_id=1)))  # of the earlier process
    meanwhile_next(rig, link, wire)


def meanwhile_next(rig: Rig, link: PrefillLink, wire: Wire) -> None:
    wire.send(Drained(transfer_id=99, decode_epoch=DECODE_EPOCH, prefill_epoch=NEXT_EPOCH))
    while link.counts.num_stale < 2:
        pass
    assert rig.events.empty()


def test_of_what_an_earlier_process_was_given_another_one_can_say_nothing(rig: Rig) -> None:
    """B47, A58: it answers for any transfer that it does not know, while the earlier one may live and write."""
    link, _, told = rig.started()
    rig.restart()
    assert isinstance(rig.event(), Ended)
    wire = rig.prefill.welcome(epoch=NEXT_EPOCH)
    while link.prefill_epoch != NEXT_EPOCH:
        pass
    wire.send(of(Unknown, told), of(Drained, told))
    meanwhile_next(rig, link, wire)
    assert link.num_held == 1


def test_where_nobody_listens_any_more_the_memory_is_freed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """B49: pages come back from a prefill that was killed."""
    monkeypatch.setattr(prefill_link, "DEAD_WRITER_GRACE_S", SHORT_GRACE_S)
    link, _, _ = rig.started()
    rig.prefill.close()
    assert isinstance(rig.event(), Ended)
    assert rig.event() == Freed(0)
    assert link.state is LinkState.DOWN
    start(link, 1)
    assert [type(rig.event()) for _ in range(2)] == [Ended, Freed]


def test_a_prefill_that_answers_again_was_not_gone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was refused in between, as by a network, proves nothing once the same process answers."""
    monkeypatch.setattr(prefill_link, "DEAD_WRITER_GRACE_S", 2.0)
    link, _, told = rig.started()
    port = rig.prefill.port
    rig.prefill.close()
    assert isinstance(rig.event(), Ended)
    while "refused" not in link.why.lower():
        pass
    rig.prefill = ScriptedPrefill(port=port)
    wire = rig.prefill.welcome()
    for _ in range(4):  # repeated every second: longer than the grace
        assert wire.receive(Abort).transfer_id == 0
    assert rig.events.empty()
    wire.send(of(Drained, told))
    assert rig.event() == Freed(0)


def test_a_refusal_is_told_with_its_reason_every_time(rig: Rig) -> None:
    """B54: whoever waits for the first answer never sees a line that merely broke."""
    for attempt in range(20):
        link = rig.link()
        wire = rig.prefill.accept()
        wire.send(Refused(reason=f"not you, {attempt}"))
        wire.close()
        link.await_first_answer(WAIT_S)
        assert (link.state, link.why) == (LinkState.REFUSED, f"not you, {attempt}")
        link.close()
    start(link)
    ended = rig.event()
    assert isinstance(ended, Ended)
    assert "not you, 19" in ended.reason
    assert rig.event() == Freed(0)


def test_a_refusal_after_the_welcome_is_the_reason_that_transfers_end_with(rig: Rig) -> None:
    _, wire, _ = rig.started()
    wire.send(Refused(reason="what was that"))
    wire.close()
    ended = rig.event()
    assert isinstance(ended, Ended)
    assert "what was that" in ended.reason


def test_a_prefill_that_hangs_up_or_says_nonsense_at_first_is_called_again(rig: Rig) -> None:
    link = rig.link()
    rig.prefill.accept().close()
    wire = rig.prefill.accept()
    wire.connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    wire.receive_end()
    rig.prefill.welcome()
    while link.state is not LinkState.READY:
        pass


def test_a_host_without_an_address_leaves_the_link_alive(rig: Rig) -> None:
    for address in ("no-such-host.invalid:1", "..:1", "127.0.0.1:0"):
        link = rig.link(address=address)
        link.await_first_answer(WAIT_S)
        assert link.state is LinkState.DOWN
        start(link, 1)
        assert [type(rig.event()) for _ in range(2)] == [Ended, Freed]


def test_a_prompt_too_long_for_a_message_fails_alone(rig: Rig) -> None:
    link, wire = rig.ready()
    start(link, 0, token_ids=bytes(MAX_MESSAGE_BYTES))
    ended = rig.event()
    assert isinstance(ended, Ended)
    assert (ended.is_retryable, "too long" in ended.reason) == (False, True)
    assert rig.event() == Freed(0)
    start(link, 1)
    wire.send(done(wire.receive(Start)))
    assert isinstance(rig.event(), Arrived)


def test_closing_tells_the_prefill_to_stop(rig: Rig) -> None:
    link, wire, _ = rig.started()
    link.close()
    assert wire.receive(Abort).transfer_id == 0
    wire.receive_end()


def test_a_second_welcome_changes_nothing(rig: Rig) -> None:
    link, wire, told = rig.started()
    wire.send(Welcome(epoch=NEXT_EPOCH, processes=[]))
    meanwhile(rig, link, wire)
    wire.send(done(told))
    assert isinstance(rig.event(), Arrived)
