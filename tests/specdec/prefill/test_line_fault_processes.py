"""Faults of the control line between processes: what is lost, repeated, late, out of order, damaged, cut, or foreign.

A relay stands between a decode group and a `specdec prefill` process; another decode group calls that process directly.
Whatever happens on the line, a request gives the text that one engine gives, or fails with a reason, and no other
request notices. Tags such as A53 are explained in `tests/INVARIANTS.md`.
"""

import contextlib
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from specdec.engine import Engine
from specdec.errors import ConfigError, TransferError
from specdec.handoff import prefill_link
from specdec.handoff.prefill_link import LinkState, PrefillLink
from specdec.sampling.sampling_params import SamplingParams
from specdec.transfer.line import frame, parse_address
from specdec.transfer.messages import (
    PROTOCOL_VERSION,
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
    encode,
)
from tests.support.asked_prompts import FLAGS, SETTINGS, Asked, Texts, greedy, prompt_of
from tests.support.faulty_line import Action, FaultyLine, LineFault, Sender, damaged
from tests.support.prefill_process import prefill_process
from tests.support.transfer_peer import open_or_skip

pytestmark = pytest.mark.xdist_group("line_fault_processes")

DEADLINE_S = 60.0
STALL_S = 0.5  # long enough to act while a message is on its way


EARLY, ELSEWHERE, BESIDE, MAIN, WHOLE, TOO_LONG = (prompt_of(size) for size in (17, 20, 30, 56, 124, 150))


def greedy_for(prompt: Sequence[int]) -> SamplingParams:
    return greedy(12 if len(prompt) == len(EARLY) else 4)


def ask(engine: Engine, prompt: list[int]) -> Asked:
    return Asked(engine, prompt, greedy_for(prompt))


@dataclass
class Rig:
    """A prefill process and two decode groups.

    Attributes:
        process: The prefill.
        address: Where it listens.
        transport: What the groups receive through.
        line: Between it and `group`.
        group: Calls through the line.
        other: Calls the prefill itself.
        texts: What one engine gives, by length of the prompt.
    """

    process: subprocess.Popen[str]
    address: str
    transport: str
    line: FaultyLine
    group: Engine
    other: Engine
    texts: Texts

    @property
    def link(self) -> PrefillLink:
        assert self.group.intake is not None
        return self.group.intake.links[0]

    def run_until(self, is_so: Callable[[], bool]) -> None:
        """Run the rounds of both groups."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline
            ran = [engine.step() for engine in (self.group, self.other)]
            if not any(ran):
                time.sleep(0.01)

    def finish(self, *asked: Asked) -> None:
        self.run_until(lambda: all(each.is_over for each in asked) and self.line.is_done)

    def has_right_text(self, asked: Asked) -> bool:
        if asked.error is None:
            assert asked.token_ids == self.texts[len(asked.prompt)]
        else:
            assert isinstance(asked.error, TransferError)
            assert asked.token_ids == ()
        return asked.error is None

    def check_serves(self) -> None:
        """See that the line is up again, that both groups are served, and that every page is back on either side."""
        self.line.script()
        self.run_until(lambda: self.link.state is LinkState.READY)
        asked = ask(self.group, WHOLE)
        self.finish(asked)
        assert self.has_right_text(asked)
        self.run_until(lambda: all_pages_are_free(self.group) and all_pages_are_free(self.other))
        assert self.process.poll() is None


def all_pages_are_free(engine: Engine) -> bool:
    free, total = engine.kv_pages()
    assert engine.intake is not None
    return free == total and engine.intake.counts.num_held_pages == 0


def decode(address: str, transport: str, **settings: Any) -> Engine:
    given = {**SETTINGS, "prefill_timeout_s": 30.0, "peer_timeout_s": 20.0, **settings}
    return Engine.from_pretrained("glm-tiny", prefill=[address], transport=transport, **given)


@pytest.fixture(scope="module")
def texts() -> Texts:
    with Engine.from_pretrained("glm-tiny", **SETTINGS) as engine:
        prompts = EARLY, ELSEWHERE, BESIDE, MAIN, WHOLE
        return {len(prompt): engine.generate(prompt, greedy_for(prompt))[0].choices[0].token_ids for prompt in prompts}


TRANSPORTS = ["local", *(pytest.param(name, marks=pytest.mark.full) for name in ("mooncake", "nixl"))]


@contextlib.contextmanager
def rig_of(process: subprocess.Popen[str], address: str, transport: str, texts: Texts) -> Iterator[Rig]:
    with (
        contextlib.closing(FaultyLine(address)) as line,
        decode(line.address, transport) as group,
        decode(address, transport) as other,
    ):
        yield Rig(process, address, transport, line, group, other, texts)


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """One that both sides can open here."""
    name: str = request.param
    open_or_skip(name).close()
    return name


@pytest.fixture(scope="module")
def rig(transport: str, texts: Texts) -> Iterator[Rig]:
    with (
        prefill_process(*FLAGS, "--no-prefix-cache", "--transport", transport) as (process, address),
        rig_of(process, address, transport, texts) as rig,
    ):
        yield rig
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


@pytest.fixture(autouse=True)
def impatient_greetings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_link, "_GREETING_TIMEOUT_S", 1.0)


@dataclass(frozen=True)
class Case:
    """A message that something happens to.

    Attributes:
        scenario: In which it is said.
        kind: Of the message.
        occurrence: As in `LineFault`.
        sender: As in `LineFault`.
        before: Faults that lead to it being said.
    """

    scenario: Callable[[Rig, LineFault, Sequence[LineFault]], None]
    kind: type[Message]
    occurrence: int = 0
    sender: Sender | None = None
    before: tuple[LineFault, ...] = ()


BREAKING = (Action.DAMAGE, Action.CUT)
OUT_OF_TURN = (Action.DROP, Action.LATE, Action.SWAP)


def serve(rig: Rig, fault: LineFault, before: Sequence[LineFault]) -> None:
    """Prompts are computed; ids ascend, so that one whose `Start` is overtaken by the next one's never begins."""
    rig.line.script(*before, fault)
    beside, main = ask(rig.group, BESIDE), ask(rig.group, MAIN)
    rig.finish(beside, main)
    for asked in (beside, main):
        if not rig.has_right_text(asked):
            is_overtaken = asked is beside and fault.kind is Start and fault.action in OUT_OF_TURN
            assert is_overtaken or fault.action in BREAKING
            # The one that was to be sent when the line had just been seen to break found no prefill.
            whys = ["dropped it"] if is_overtaken else ["was lost", "no prefill is left"]
            assert any(why in str(asked.error) for why in whys)


def call_again(rig: Rig, fault: LineFault, before: Sequence[LineFault]) -> None:
    """The line breaks while prompts are computed, and the group calls again."""
    rig.line.script(*before, fault)
    beside, main = ask(rig.group, BESIDE), ask(rig.group, MAIN)
    rig.run_until(lambda: rig.line.num_seen(Start) == 2)
    rig.line.cut()
    rig.finish(beside, main)
    for asked in (beside, main):
        assert rig.has_right_text(asked) or "was lost" in str(asked.error)


def give_up(rig: Rig, fault: LineFault, before: Sequence[LineFault]) -> None:
    """A prompt is given up while it is computed."""
    rig.line.script(*before, fault)
    beside, main = ask(rig.group, BESIDE), ask(rig.group, MAIN)
    rig.run_until(lambda: rig.line.num_seen(Progress) > 0)
    main.give_up()
    rig.finish(beside)
    assert rig.has_right_text(beside) or (fault.action in BREAKING and "was lost" in str(beside.error))
    assert main.is_over
    assert main.token_ids == ()


def fail(rig: Rig, fault: LineFault, before: Sequence[LineFault]) -> None:
    """A prompt is longer than the prefill takes."""
    rig.line.script(*before, fault)
    beside, main = ask(rig.group, BESIDE), ask(rig.group, TOO_LONG)
    rig.finish(beside, main)
    assert rig.has_right_text(beside) or (fault.action in BREAKING and "was lost" in str(beside.error))
    reasons = ["--max-model-len"]
    reasons += ["was lost"] if fault.action in BREAKING else []
    reasons += ["dropped it"] if fault.kind is Failed and fault.action in OUT_OF_TURN else []
    assert any(reason in str(main.error) for reason in reasons)


def refuse(rig: Rig, fault: LineFault, before: Sequence[LineFault]) -> None:
    """A group with other pages calls through the same relay."""
    rig.line.script(*before, fault)
    facts = msgspec.structs.replace(rig.group.pool_facts, page_size=32)
    link = PrefillLink(
        rig.line.address,
        epoch=secrets.token_hex(16),
        transport=rig.transport,
        facts=facts,
        peer_timeout_s=20.0,
        on_event=lambda _event: None,
    )
    beside = ask(rig.group, BESIDE)
    rig.finish(beside)
    assert rig.has_right_text(beside)
    rig.run_until(lambda: link.state is LinkState.REFUSED)
    assert "start both with one --page-size" in link.why
    link.close()


UNTOLD = LineFault(Action.DROP, Start, occurrence=1)
ON_ITS_WAY = LineFault(Action.DELAY, Progress, delay_s=STALL_S)
CASES = {
    "hello": Case(call_again, Hello),
    "welcome": Case(call_again, Welcome),
    "refused": Case(refuse, Refused),
    "first_start": Case(serve, Start),
    "last_start": Case(serve, Start, occurrence=1),
    "progress": Case(serve, Progress, occurrence=1),
    "done": Case(serve, Done),
    "ask": Case(serve, Ask, before=(UNTOLD,)),
    "unknown": Case(serve, Unknown, before=(UNTOLD,)),
    "abort": Case(give_up, Abort, before=(ON_ITS_WAY,)),
    "drained_after_abort": Case(give_up, Drained, before=(ON_ITS_WAY,)),
    "failed": Case(fail, Failed),
    "drained_after_failed": Case(fail, Drained),
    "heartbeat_of_decode": Case(
        serve, Heartbeat, sender=Sender.DECODE, before=(LineFault(Action.DELAY, Progress, delay_s=0.8),)
    ),
    "heartbeat_of_prefill": Case(
        serve, Heartbeat, sender=Sender.PREFILL, before=(LineFault(Action.DELAY, Start, delay_s=0.8),)
    ),
}
ACTIONS = [action for action in Action if action is not Action.CHANGE]
_random = Random(0)
SAMPLE = {(_random.choice(sorted(CASES)), action) for action in ACTIONS}


@pytest.mark.parametrize(
    ("name", "action"),
    [
        pytest.param(name, action, id=f"{name}-{action}", marks=[] if (name, action) in SAMPLE else [pytest.mark.full])
        for name in CASES
        for action in ACTIONS
    ],
)
def test_a_fault_of_the_line_changes_no_text(rig: Rig, name: str, action: Action) -> None:
    """A53, B49, B53: any message is lost, comes twice, late, out of order, damaged, or half before the line breaks."""
    case = CASES[name]
    breaks = case.scenario is call_again or (action in BREAKING and case.scenario is not refuse)
    num_connections = rig.link.counts.num_connections
    rig.line.script()
    early, elsewhere = ask(rig.group, EARLY), ask(rig.other, ELSEWHERE)
    rig.run_until(lambda: bool(early.token_ids))
    case.scenario(rig, LineFault(action, case.kind, case.occurrence, case.sender), case.before)
    rig.finish(early, elsewhere)
    assert rig.has_right_text(early)
    assert rig.has_right_text(elsewhere)
    rig.run_until(lambda: rig.link.counts.num_connections >= num_connections + breaks)
    assert breaks or rig.link.counts.num_connections == num_connections
    rig.check_serves()


def changed(kind: type[Message], occurrence: int = 0, **fields: Any) -> LineFault:
    """Let a message come with other fields than it was sent with."""
    return LineFault(Action.CHANGE, kind, occurrence, change=lambda message: msgspec.structs.replace(message, **fields))


def other_facts(**fields: Any) -> LineFault:
    return LineFault(
        Action.CHANGE,
        Hello,
        change=lambda hello: msgspec.structs.replace(hello, facts=msgspec.structs.replace(hello.facts, **fields)),
    )


class NewerHello(Hello, frozen=True, kw_only=True, tag="Hello"):
    """As a later version may say it."""

    num_lines: int = 1


def newer(hello: Hello) -> Hello:
    return NewerHello(protocol=hello.protocol + 1, epoch=hello.epoch, transport=hello.transport, facts=hello.facts)


def other_place(**fields: Any) -> LineFault:
    return LineFault(
        Action.CHANGE,
        Start,
        occurrence=1,
        change=lambda start: msgspec.structs.replace(
            start, destination=msgspec.structs.replace(start.destination, **fields)
        ),
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        pytest.param(
            {"page_size": 32},
            "page_size of the decode group is 32, of the prefill 8: start both with one --page-size",
            id="page_size",
        ),
        pytest.param(
            {"kv_format": "fp8_packed"},
            "kv_format of the decode group is fp8_packed, of the prefill float32",
            id="packed",
        ),
        pytest.param(
            {"kv_format": "fp8", "kv_scale": 0.5},
            "kv_format of the decode group is fp8, of the prefill float32",
            id="fp8",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"latent_norm_eps": 1e-3},
            "another rounding: start both with the same checkpoint, --dtype and",
            id="rounding",
            marks=pytest.mark.full,
        ),
        pytest.param(changed(Hello, protocol=PROTOCOL_VERSION + 1), "run one version of specdec", id="protocol"),
        pytest.param(LineFault(Action.CHANGE, Hello, change=newer), "run the same version of specdec", id="fields"),
        pytest.param(other_facts(target="another"), "the layouts of their pages differ", id="layout"),
        pytest.param(other_facts(draft="another"), "has another one", id="draft", marks=pytest.mark.full),
        pytest.param(
            changed(Hello, transport="another"),
            "start both with one --transport",
            id="transport",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_group_that_does_not_fit_is_told_why_while_others_are_served(
    rig: Rig, settings: dict[str, Any] | LineFault, reason: str
) -> None:
    """A52, B54: nothing of it is computed or written."""
    is_change = isinstance(settings, LineFault)
    rig.line.script(*([settings] if is_change else []))
    main, elsewhere = ask(rig.group, MAIN), ask(rig.other, ELSEWHERE)
    rig.run_until(lambda: rig.line.num_seen(Start) > 0)
    with pytest.raises(ConfigError) as caught:
        decode(rig.line.address, rig.transport, **({} if is_change else settings))
    assert reason in str(caught.value)
    rig.finish(main, elsewhere)
    assert rig.has_right_text(main)
    assert rig.has_right_text(elsewhere)
    rig.check_serves()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(other_place(tp_size=3, dcp_size=2), "dcp_size must divide tp_size", id="sizes"),
        pytest.param(other_place(tp_size=2), "2 ranks have an address each, got 1", id="ranks", marks=pytest.mark.full),
        pytest.param(other_place(num_pages=1), "page ids must be below 1", id="pages", marks=pytest.mark.full),
        pytest.param(other_place(addresses=[b"nowhere"]), "", id="address"),
    ],
)
def test_a_start_that_cannot_be_served_fails_alone(rig: Rig, fault: LineFault, reason: str) -> None:
    """A52, B54: impossible geometry, pages, addresses."""
    rig.line.script(fault)
    beside, main, elsewhere = ask(rig.group, BESIDE), ask(rig.group, MAIN), ask(rig.other, ELSEWHERE)
    rig.finish(beside, main, elsewhere)
    assert rig.has_right_text(beside)
    assert rig.has_right_text(elsewhere)
    assert not rig.has_right_text(main)
    assert reason in str(main.error)
    rig.check_serves()


def test_a_start_that_names_an_earlier_process_is_begun_once_it_names_this_one(rig: Rig) -> None:
    """A58: the answer to it is as stale as the question."""
    num_stale = rig.link.counts.num_stale
    rig.line.script(changed(Start, prefill_epoch="x" * 32))
    main = ask(rig.group, MAIN)
    rig.finish(main)
    assert rig.has_right_text(main)
    assert rig.link.counts.num_stale == num_stale + 2
    rig.check_serves()


def test_a_prefill_that_says_it_is_another_one_is_given_nothing(rig: Rig) -> None:
    """A58: prompts that name an epoch which is not that of the process are not computed."""
    rig.line.script(changed(Welcome, epoch="x" * 32))
    rig.line.cut()
    rig.run_until(lambda: rig.line.is_done and rig.link.state is LinkState.READY)
    main = ask(rig.group, MAIN)
    rig.finish(main)
    assert "it was meant for an earlier process here" in str(main.error)
    rig.run_until(lambda: all_pages_are_free(rig.group))
    rig.line.cut()
    rig.run_until(lambda: rig.line.num_seen(Welcome) == 2)
    rig.check_serves()


STAGES: dict[str, tuple[list[int], LineFault | None, Callable[[Rig, Asked], bool]]] = {
    "queued": (MAIN, None, lambda _rig, _main: True),
    "told": (MAIN, LineFault(Action.DELAY, Start, delay_s=STALL_S), lambda rig, _main: rig.line.num_seen(Start) > 0),
    "begun": (MAIN, ON_ITS_WAY, lambda rig, _main: rig.line.num_seen(Progress) > 0),
    "half": (
        MAIN,
        LineFault(Action.DELAY, Progress, occurrence=2, delay_s=STALL_S),
        lambda rig, _main: rig.line.num_seen(Progress) > 2,
    ),
    "complete": (
        MAIN,
        LineFault(Action.DELAY, Done, occurrence=1, delay_s=STALL_S),
        lambda rig, _main: rig.line.num_seen(Done) > 1,
    ),
    "decoding": (MAIN, None, lambda _rig, main: bool(main.token_ids)),
    "failed": (
        TOO_LONG,
        LineFault(Action.DELAY, Failed, delay_s=STALL_S),
        lambda rig, _main: rig.line.num_seen(Failed) > 0,
    ),
}


@pytest.mark.parametrize(
    "stage",
    ["told", "half", "complete", "decoding"]
    + [pytest.param(stage, marks=pytest.mark.full) for stage in ("queued", "begun", "failed")],
)
def test_a_prompt_may_be_given_up_at_any_stage(rig: Rig, stage: str) -> None:
    """A50, B48: nothing of it is left on either side, and what it shared the line with goes on."""
    prompt, fault, is_there = STAGES[stage]
    rig.line.script(*([] if fault is None else [fault]))
    beside, main = ask(rig.group, BESIDE), ask(rig.group, prompt)
    rig.run_until(lambda: is_there(rig, main))
    assert not main.is_over
    main.give_up()
    rig.finish(beside)
    assert rig.has_right_text(beside)
    assert main.is_over
    assert main.error is None
    rig.check_serves()


def test_messages_that_no_group_of_ours_would_send_disturb_nobody(rig: Rig) -> None:
    """B53: damaged behind a right checksum, so that each is read; the prefill lives and keeps no page."""
    random = Random(0)
    facts, epoch = rig.group.pool_facts, secrets.token_hex(16)
    place = Destination(
        facts=facts, tp_size=1, dcp_size=1, num_pages=64, page_ids=np.arange(4).tobytes(), addresses=[b"nowhere"]
    )
    names: dict[str, Any] = {"decode_epoch": epoch, "prefill_epoch": rig.link.prefill_epoch}
    hello = Hello(protocol=PROTOCOL_VERSION, epoch=epoch, transport=rig.transport, facts=facts)
    main, elsewhere = ask(rig.group, MAIN), ask(rig.other, ELSEWHERE)
    for transfer_id in range(100):
        start = Start(
            transfer_id=transfer_id,
            **names,
            token_ids=np.array(ELSEWHERE, dtype=np.int32).tobytes(),
            num_cached=0,
            cache_salt=b"",
            priority=0,
            destination=place,
            deadline_s=DEADLINE_S,
        )
        messages: list[Message] = [hello, start, Ask(transfer_id=transfer_id, **names)]
        data = [encode(message) for message in messages]
        changed_one = random.randrange(len(data))
        data[changed_one] = damaged(data[changed_one], random)
        with contextlib.suppress(ConnectionError), socket.create_connection(parse_address(rig.address)) as connection:
            connection.sendall(b"".join(frame(each) for each in data))
        rig.group.step()
        rig.other.step()
    rig.finish(main, elsewhere)
    assert rig.has_right_text(main)
    assert rig.has_right_text(elsewhere)
    rig.check_serves()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(24))
def test_no_damage_is_read_as_another_message(rig: Rig, seed: int) -> None:
    """B53: not as other pages, nor as another hidden state."""
    rig.line.random = Random(seed)
    kind = (Start, Done, Progress)[seed % 3]
    num_connections = rig.link.counts.num_connections
    serve(rig, LineFault(Action.DAMAGE, kind, occurrence=1), ())
    rig.run_until(lambda: rig.link.counts.num_connections > num_connections)
    rig.check_serves()


@pytest.mark.full
def test_a_line_that_stands_still_fails_what_waits_on_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """B47: nobody has hung up; what was on its way is stale when it comes."""
    monkeypatch.setattr(rig.link, "_peer_timeout_s", 1.5)
    rig.line.script(LineFault(Action.DELAY, Progress, delay_s=4.0))
    beside, main, elsewhere = ask(rig.group, BESIDE), ask(rig.group, MAIN), ask(rig.other, ELSEWHERE)
    rig.run_until(lambda: beside.is_over and main.is_over)
    for asked in (beside, main):
        assert "no sign of life" in str(asked.error)
    assert not all_pages_are_free(rig.group)
    rig.finish(elsewhere)
    assert rig.has_right_text(elsewhere)
    rig.run_until(lambda: rig.line.num_seen(Drained) > 0)
    rig.check_serves()


@pytest.mark.full
def test_another_process_at_the_same_address_is_not_taken_for_the_first(transport: str, texts: Texts) -> None:
    """A58, B52, B47: nothing that the first said, or was told, means anything to or of the second."""
    flags = *FLAGS, "--no-prefix-cache", "--transport", transport
    with (
        prefill_process(*flags) as (first, address),
        rig_of(first, address, transport, texts) as rig,
        prefill_process(*flags) as (second, other_address),
    ):
        early = ask(rig.group, EARLY)
        rig.run_until(lambda: bool(early.token_ids))
        over = rig.line.last(Start), rig.line.last(Done)
        rig.line.script(LineFault(Action.DELAY, Progress, delay_s=STALL_S))
        main = ask(rig.group, MAIN)
        rig.run_until(lambda: rig.line.num_seen(Progress) > 0)
        rig.line.prefill = other_address
        rig.line.cut()
        rig.finish(early, main)
        assert rig.has_right_text(early)
        assert "was lost" in str(main.error)
        rig.run_until(lambda: rig.link.state is LinkState.READY)

        num_stale = rig.link.counts.num_stale
        started = rig.line.last(Start)
        names = {name: getattr(started, name) for name in ("transfer_id", "decode_epoch", "prefill_epoch")}
        for message in (over[0], started, Abort(**names), Ask(**names)):
            rig.line.say(message, sender=Sender.DECODE)
        rig.line.say(over[1], sender=Sender.PREFILL)
        rig.run_until(lambda: rig.link.counts.num_stale >= num_stale + 7)
        asked = ask(rig.group, WHOLE)
        rig.finish(asked)
        assert rig.has_right_text(asked)
        assert not all_pages_are_free(rig.group)  # the first lives, and may write
        first.kill()
        rig.process = second
        rig.check_serves()
