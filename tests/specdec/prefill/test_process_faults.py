"""Faults of writes, passes and processes, with a prefill and its decode groups in processes of their own.

A decode group runs in this process; each prefill is `specdec prefill` with writes and passes that go wrong when it is
told so. Whatever happens, a request gives the text that one engine gives or fails with a reason, no other request
notices, and all pages come back. Tags such as B47 are explained in `tests/INVARIANTS.md`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from specdec.cli.main import EXIT_RANK_LOST
from specdec.dcp.pool import KvPool
from specdec.engine import Engine
from specdec.errors import TransferError
from specdec.handoff.prefill_link import DEAD_WRITER_GRACE_S, LinkState, PrefillLink
from specdec.sampling.sampling_params import SamplingParams
from specdec.transfer.messages import Failed
from tests.support.asked_prompts import FLAGS, SETTINGS, Asked, Texts, greedy, prompt_of
from tests.support.faulty_line import FaultyLine
from tests.support.faulty_prefill import FaultyPrefill, faulty_prefill
from tests.support.faulty_transport import Fault
from tests.support.processes import await_end, children_of
from tests.support.transfer_peer import open_or_skip

pytestmark = pytest.mark.xdist_group("handoff_processes")

NARROW: dict[str, Any] = {"max_model_len": 64, "num_pages": 8}  # one of its prompts needs all pages
PEER_TIMEOUT_S, PREFILL_TIMEOUT_S, RANK_TIMEOUT_S = 1.5, 4.0, 10.0
DEADLINE_S = 60.0


EARLY, ELSEWHERE, BESIDE, MAIN, NEXT, WHOLE = (prompt_of(size) for size in (17, 20, 30, 56, 58, 124))
CHUNKS = 3  # of MAIN and NEXT, each with a write of target KV and one of draft KV


def greedy_for(prompt: Sequence[int]) -> SamplingParams:
    return greedy(40 if len(prompt) == len(EARLY) else 4)


def ask(engine: Engine, prompt: list[int]) -> Asked:
    return Asked(engine, prompt, greedy_for(prompt))


class Groups:
    """Decode groups in this process, whose rounds run in turns.

    Args:
        transport: What they receive through.
        texts: What one engine gives, by length of the prompt.
    """

    def __init__(self, transport: str, texts: Texts) -> None:
        self.transport = transport
        self.texts = texts
        self._engines: list[Engine] = []
        self._opened = contextlib.ExitStack()

    def open(self, *prefills: str, **settings: Any) -> Engine:
        """Open one whose pools hold NaN, so that a row that was never written shows."""
        given = {**SETTINGS, "prefill_timeout_s": DEADLINE_S, "peer_timeout_s": DEADLINE_S, **settings}
        engine = Engine.from_pretrained("glm-tiny", prefill=list(prefills), transport=self.transport, **given)
        self._opened.enter_context(engine)
        self._engines.append(engine)
        worker = engine.core.ranks.worker
        for pool in (worker.pool, *(() if worker.draft is None else (worker.draft.pool,))):
            assert isinstance(pool, KvPool)
            for entry in pool.layout.entries:
                pool.buffer(entry.kind).fill_(0xFF)
        return engine

    def close(self) -> None:
        self._opened.close()

    def run_until(self, is_so: Callable[[], bool]) -> None:
        """Run the rounds of all groups."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline
            ran = [engine.step() for engine in self._engines]
            if not any(ran):
                time.sleep(0.01)

    def finish(self, *asked: Asked) -> None:
        self.run_until(lambda: all(each.is_over for each in asked))

    def check_right(self, *asked: Asked) -> None:
        """See that these gave their text."""
        self.finish(*asked)
        for each in asked:
            assert each.error is None
            assert each.token_ids == self.texts[len(each.prompt)]

    def check_failed(self, asked: Asked, *reasons: str) -> None:
        """See that this one failed for one of these reasons, before anything of it was given."""
        self.finish(asked)
        assert isinstance(asked.error, TransferError)
        assert any(reason in str(asked.error) for reason in reasons), asked.error
        assert asked.token_ids == ()

    def check_serves(self, engine: Engine, prefill: FaultyPrefill) -> None:
        """See that a group is served by a prefill, and that every page is back on either side."""
        link = link_of(engine, prefill.address)
        self.run_until(lambda: link.state is LinkState.READY)
        self.run_until(lambda: all_pages_are_free(engine) and prefill.is_at_start)
        num_done = prefill.state.num_done
        self.check_right(ask(engine, WHOLE if engine.max_model_len > len(WHOLE) else NEXT))
        self.run_until(lambda: all_pages_are_free(engine) and prefill.is_at_start)
        assert prefill.state.num_done > num_done
        assert prefill.process.poll() is None


def link_of(engine: Engine, address: str) -> PrefillLink:
    assert engine.intake is not None
    (link,) = (link for link in engine.intake.links if link.address == address)
    return link


def all_pages_are_free(engine: Engine) -> bool:
    free, total = engine.kv_pages()
    assert engine.intake is not None
    return free == total and engine.intake.counts.num_held_pages == 0


@pytest.fixture(scope="module")
def texts() -> Texts:
    with Engine.from_pretrained("glm-tiny", **SETTINGS) as engine:
        prompts = EARLY, ELSEWHERE, BESIDE, MAIN, NEXT, WHOLE
        return {len(prompt): engine.generate(prompt, greedy_for(prompt))[0].choices[0].token_ids for prompt in prompts}


@pytest.fixture(
    scope="module", params=["local", *(pytest.param(n, marks=pytest.mark.full) for n in ("mooncake", "nixl"))]
)
def transport(request: pytest.FixtureRequest) -> str:
    """One that both sides can open here."""
    name: str = request.param
    open_or_skip(name).close()
    return name


@contextlib.contextmanager
def prefill_of(transport: str, *flags: str, listen: str = "127.0.0.1:0") -> Iterator[FaultyPrefill]:
    with faulty_prefill(*FLAGS, "--no-prefix-cache", "--transport", transport, *flags, listen=listen) as prefill:
        yield prefill


@pytest.fixture(scope="module")
def kept_prefill(transport: str) -> Iterator[FaultyPrefill]:
    with prefill_of(transport) as prefill:
        yield prefill
        prefill.process.send_signal(signal.SIGTERM)
        assert prefill.process.wait(DEADLINE_S) == 0


@pytest.fixture
def sound(kept_prefill: FaultyPrefill) -> Iterator[FaultyPrefill]:
    """A prefill that no test kills; it ends in order."""
    yield kept_prefill
    for command in ("faults", "go", "release"):
        kept_prefill.tell(command)


@pytest.fixture
def groups(transport: str, texts: Texts) -> Iterator[Groups]:
    groups = Groups(transport, texts)
    with contextlib.closing(groups):
        yield groups


LATE = [Fault.DELAY, Fault.SWAP, None, Fault.SWAP, Fault.SWAP, None]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([Fault.DELAY] * 6, id="delayed", marks=pytest.mark.full),
        pytest.param([Fault.SWAP, None, Fault.SWAP, Fault.SWAP, None, None], id="swapped", marks=pytest.mark.full),
        pytest.param(LATE, id="both"),
    ],
)
def test_writes_may_be_late_and_out_of_order(groups: Groups, sound: FaultyPrefill, faults: list[Fault | None]) -> None:
    """A53, B49: a prompt is complete when every write has ended, in whatever order."""
    group, other = groups.open(sound.address), groups.open(sound.address)
    sound.script(*faults * 2)
    groups.check_right(ask(group, MAIN), ask(other, NEXT))
    assert sound.state.num_faults_left == 0
    groups.check_serves(group, sound)


@pytest.mark.parametrize("num_before", [0, 3, 2 * CHUNKS - 1])
@pytest.mark.parametrize("fault", [Fault.FAIL_TO_POST, Fault.FAIL_AFTER_LANDING])
@pytest.mark.full
def test_a_write_that_fails_fails_its_request_and_no_other(
    groups: Groups, sound: FaultyPrefill, fault: Fault, num_before: int
) -> None:
    """B51, A51: in the first chunk, between two, in the last."""
    group, other = groups.open(sound.address), groups.open(sound.address)
    early = ask(other, EARLY)
    groups.run_until(lambda: bool(early.token_ids))
    sound.script(*[None] * num_before, fault)
    groups.check_failed(ask(group, MAIN), "as the test wants it")
    sound.script(fault)
    together = [ask(group, MAIN), ask(group, BESIDE), ask(other, NEXT)]
    groups.finish(*together)
    (failed,) = (asked for asked in together if asked.error is not None)
    groups.check_failed(failed, "as the test wants it")
    groups.check_right(early, *(asked for asked in together if asked is not failed))
    groups.check_serves(group, sound)
    groups.check_serves(other, sound)


def test_pages_that_a_failed_write_may_still_land_in_wait_for_it(groups: Groups, sound: FaultyPrefill) -> None:
    """B47, A49, A50: both sides hold them; the next request, which needs them, has its own text."""
    narrow, other = groups.open(sound.address, **NARROW), groups.open(sound.address)
    sound.script(None, Fault.LAND_LATE)
    groups.check_failed(ask(narrow, MAIN), "lands later")
    waiting, elsewhere = ask(narrow, NEXT), ask(other, ELSEWHERE)
    groups.check_right(elsewhere)
    assert not waiting.is_over
    assert not all_pages_are_free(narrow)
    assert not sound.is_at_start
    sound.tell("release")
    groups.check_right(waiting)
    groups.check_serves(narrow, sound)


@pytest.mark.full
@pytest.mark.parametrize("num_before", [0, 2, 2 * CHUNKS - 1])
def test_a_write_that_lands_after_an_abort_finds_its_pages_held(
    groups: Groups, sound: FaultyPrefill, num_before: int
) -> None:
    """O18, A49, A50: the next request waits for all pages of the group, and its text is not that of the late write."""
    narrow, other = groups.open(sound.address, **NARROW), groups.open(sound.address)
    num_writes = sound.state.num_writes
    sound.script(*[None] * num_before, *[Fault.STUCK] * 6)
    given_up = ask(narrow, NEXT)
    groups.run_until(lambda: sound.state.num_writes > num_writes + num_before)
    given_up.give_up()
    groups.finish(given_up)
    assert narrow.kv_pages() == (0, 8)
    waiting = ask(narrow, MAIN)
    sound.script()  # of the first prompt fewer writes may have been posted
    groups.check_right(ask(other, ELSEWHERE))
    assert not waiting.is_over
    assert narrow.kv_pages() == (0, 8)
    sound.tell("release")
    groups.check_right(waiting)
    groups.check_serves(narrow, sound)


@pytest.mark.full
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("num_passes", range(CHUNKS))
def test_a_pass_that_fails_is_told_at_once(groups: Groups, sound: FaultyPrefill, num_passes: int, when: str) -> None:
    """O19, A51: in the first, a middle and the last chunk; both sides know why, and others go on."""
    with contextlib.closing(FaultyLine(sound.address)) as line:
        group, other = groups.open(line.address), groups.open(sound.address)
        early = ask(other, EARLY)
        groups.run_until(lambda: bool(early.token_ids))
        num_failed = sound.state.num_failed
        sound.tell("fail", num_passes, when)
        main = ask(group, MAIN)
        groups.check_failed(main, "could not be computed")
        assert "as the test wants it" in str(main.error)
        assert line.last(Failed).reason in str(main.error)
        assert sound.tell("go").num_failed == num_failed + 1
        groups.check_right(early, ask(group, BESIDE), ask(other, MAIN))
        groups.check_serves(other, sound)
        groups.run_until(lambda: all_pages_are_free(group))


@dataclass(frozen=True)
class Stage:
    """How far a prefill is with MAIN when it dies.

    Attributes:
        num_passes: Passes that it has run; the next one does not begin.
        stops_first: Whether it is stopped before it is killed.
    """

    num_passes: int
    stops_first: bool = False

    @property
    def is_computed(self) -> bool:
        """Whether only writes are left."""
        return self.num_passes == CHUNKS


STAGES = {
    "before_the_first_chunk": Stage(0),
    "between_chunks": Stage(1),
    "after_the_last_chunk": Stage(CHUNKS),
    "stopped_between_chunks": Stage(1, stops_first=True),
    "stopped_after_the_last_chunk": Stage(CHUNKS, stops_first=True),
}


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))
def test_a_prefill_that_is_killed_fails_or_moves_its_requests(
    groups: Groups, sound: FaultyPrefill, stage: Stage
) -> None:
    """B47, B49, B52: where no other is left it fails at once; the next process at the address serves with all pages."""
    with contextlib.ExitStack() as stack:
        dying = stack.enter_context(prefill_of(groups.transport))
        alone = groups.open(dying.address, peer_timeout_s=PEER_TIMEOUT_S if stage.stops_first else DEADLINE_S)
        two, other = groups.open(dying.address, sound.address), groups.open(sound.address)
        early = ask(alone, EARLY)
        groups.run_until(lambda: bool(early.token_ids))
        num_writes = dying.state.num_writes
        if stage.is_computed:
            dying.script(*[Fault.STUCK] * 100)
        else:
            dying.tell("hold", stage.num_passes)
        main = ask(alone, MAIN)
        if stage.is_computed:
            groups.run_until(lambda: dying.state.num_writes == num_writes + 2 * CHUNKS)
            assert dying.state.num_requests == 0
        else:
            groups.run_until(lambda: dying.state.is_held)
        moved, elsewhere = ask(two, NEXT), ask(other, ELSEWHERE)
        groups.run_until(lambda: link_of(two, dying.address).num_tokens > 0)
        if stage.stops_first:
            dying.process.send_signal(signal.SIGSTOP)
            groups.check_failed(main, "no sign of life")
            assert not moved.is_over
        dying.process.kill()
        assert dying.process.wait(DEADLINE_S) == -signal.SIGKILL
        groups.check_failed(main, "no sign of life" if stage.stops_first else "was lost")
        assert not all_pages_are_free(alone)  # its last bytes may be on their way
        groups.check_right(early, moved, elsewhere)
        groups.run_until(lambda: all_pages_are_free(alone) and all_pages_are_free(two))
        successor = stack.enter_context(prefill_of(groups.transport, listen=dying.address))
        groups.check_serves(alone, successor)
        groups.check_serves(other, sound)
        groups.run_until(lambda: all_pages_are_free(two))


@dataclass(frozen=True)
class Loss:
    """What becomes of the ranks of a layer split.

    Attributes:
        follower: What is sent to the second rank.
        leader: What is sent to the first one after that.
        is_idle: Whether no prompt is computed meanwhile.
    """

    follower: signal.Signals
    leader: signal.Signals | None = None
    is_idle: bool = False


LOSSES = {
    "follower_killed": Loss(signal.SIGKILL),
    "follower_killed_while_idle": Loss(signal.SIGKILL, is_idle=True),
    "follower_stopped": Loss(signal.SIGSTOP),
    "leader_killed_while_the_follower_is_stopped": Loss(signal.SIGSTOP, signal.SIGKILL),
}


@pytest.mark.full
@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_a_rank_of_a_layer_split_that_is_lost_ends_its_prefill_and_nothing_else(
    groups: Groups, sound: FaultyPrefill, loss: Loss
) -> None:
    """B47, B49: the pages are held as long as any rank of it is left."""
    flags = "--cp-size", "2", "--rank-timeout-s", str(RANK_TIMEOUT_S)
    with contextlib.ExitStack() as stack:
        dying = stack.enter_context(prefill_of(groups.transport, *flags))
        alone, two = groups.open(dying.address), groups.open(dying.address, sound.address)
        other = groups.open(sound.address)
        (follower,) = children_of(dying.process.pid)
        stack.callback(kill_if_left, follower)
        early, elsewhere = ask(alone, EARLY), ask(other, ELSEWHERE)
        groups.run_until(lambda: bool(early.token_ids))
        if not loss.is_idle:
            dying.tell("hold", 1)
            main, moved = ask(alone, MAIN), ask(two, NEXT)
            groups.run_until(lambda: dying.state.is_held and link_of(two, dying.address).num_tokens > 0)
        os.kill(follower, loss.follower)
        if loss.leader is not None:
            dying.process.send_signal(loss.leader)
        elif not loss.is_idle:
            dying.say("go")
        assert dying.process.wait(DEADLINE_S) == (EXIT_RANK_LOST if loss.leader is None else -loss.leader)
        if loss.is_idle:
            groups.run_until(lambda: link_of(two, dying.address).state is LinkState.DOWN)
            main, moved = ask(alone, MAIN), ask(two, NEXT)
        groups.check_failed(main, *(["no prefill is left"] if loss.is_idle else ["was lost", "rank 1 is gone"]))
        groups.check_right(early, moved, elsewhere)
        if loss.leader is not None:
            patient_until = time.monotonic() + DEAD_WRITER_GRACE_S + 2.0
            groups.run_until(lambda: time.monotonic() > patient_until)
            assert not all_pages_are_free(alone)  # it may go on at any moment, and write
            os.kill(follower, signal.SIGCONT)
        assert await_end({follower}, timeout_s=DEADLINE_S) == set()
        groups.run_until(lambda: all_pages_are_free(alone) and all_pages_are_free(two))
        successor = stack.enter_context(prefill_of(groups.transport, *flags, listen=dying.address))
        groups.check_serves(alone, successor)
        groups.check_serves(other, sound)


def kill_if_left(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


GROUP = f"""
import sys
from specdec import Engine, SamplingParams
engine = Engine.from_pretrained("glm-tiny", prefill=[sys.argv[1]], transport=sys.argv[2], **{SETTINGS!r})
streams = [engine.stream(prompt, SamplingParams(max_tokens=4)) for prompt in ({MAIN!r}, {BESIDE!r})]
print("asked", flush=True)
while True:
    engine.step()
"""


@pytest.mark.full
@pytest.mark.parametrize("stops_first", [False, True], ids=["killed", "stopped_then_killed"])
@pytest.mark.parametrize("is_computed", [False, True], ids=["between_chunks", "while_it_is_written_to"])
def test_a_prefill_gives_the_pages_of_a_decode_group_that_is_killed_to_others(
    groups: Groups, sound: FaultyPrefill, is_computed: bool, stops_first: bool
) -> None:
    """B49, A50: groups that are there already are served on, and a new one gets all pages."""
    other = groups.open(sound.address)
    num_started = sound.state.num_started
    if is_computed:
        sound.script(*[Fault.STUCK] * 100)
    else:
        sound.tell("hold", 1)
    command = [sys.executable, "-c", GROUP, sound.address, groups.transport]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == "asked\n"
        groups.run_until(lambda: sound.state.num_started == num_started + 2 or sound.state.is_held)
        groups.run_until(lambda: sound.state.num_requests == 0 if is_computed else sound.state.is_held)
        sound.tell("faults")
        if stops_first:
            dying.send_signal(signal.SIGSTOP)
        early = ask(other, EARLY)
        if is_computed:
            groups.run_until(lambda: bool(early.token_ids))
        dying.kill()
    if is_computed:
        assert not sound.is_at_start  # what is read from is not given away
    sound.tell("go")
    sound.tell("release")
    new = groups.open(sound.address)
    groups.check_right(early, ask(new, MAIN))
    groups.check_serves(new, sound)
    groups.check_serves(other, sound)


@pytest.mark.full
@pytest.mark.parametrize("is_given_up", [False, True], ids=["lost", "given_up"])
@pytest.mark.parametrize("has_another", [False, True], ids=["alone", "with_another"])
def test_a_group_takes_other_memory_where_a_stopped_prefill_holds_all_of_its_own(
    groups: Groups, sound: FaultyPrefill, has_another: bool, is_given_up: bool
) -> None:
    """B47, B49: the last resort; when the prefill goes on, what it still writes goes where nobody reads."""
    with prefill_of(groups.transport) as stopped:
        timeouts = {"peer_timeout_s": PEER_TIMEOUT_S, "prefill_timeout_s": PREFILL_TIMEOUT_S}
        addresses = [stopped.address, sound.address] if has_another else [stopped.address]
        narrow, other = groups.open(*addresses, **NARROW, **timeouts), groups.open(sound.address)
        assert narrow.intake is not None
        intake = narrow.intake
        stopped.script(*[Fault.STUCK] * 100)
        first = ask(narrow, NEXT)
        groups.run_until(lambda: stopped.state.num_writes > 1)
        stopped.process.send_signal(signal.SIGSTOP)
        if is_given_up:
            first.give_up()
            groups.finish(first)
        elif not has_another:
            groups.check_failed(first, "no sign of life")
        waiting = ask(narrow, MAIN)
        groups.check_right(ask(other, ELSEWHERE))
        assert narrow.kv_pages() == (0, 8)
        assert not waiting.is_over
        groups.finish(first, waiting)
        if not is_given_up and has_another:
            groups.check_failed(first, f"no prefill delivered in {PREFILL_TIMEOUT_S:g} s")
        if has_another:
            groups.check_right(waiting)
        else:
            groups.check_failed(waiting, "no prefill is left")
        assert intake.counts.num_reopened == 1
        assert all_pages_are_free(narrow)

        decoding = [ask(narrow, EARLY)] if has_another else []
        groups.run_until(lambda: all(asked.token_ids for asked in decoding))
        stopped.process.send_signal(signal.SIGCONT)
        stopped.script()
        stopped.tell("release")
        groups.check_right(*decoding)
        groups.run_until(lambda: all(link.state is LinkState.READY for link in intake.links) and stopped.is_at_start)
        for prompt in (NEXT, BESIDE, MAIN):
            groups.check_right(ask(narrow, prompt))
        groups.check_serves(groups.open(stopped.address), stopped)
        groups.check_serves(other, sound)
        groups.run_until(lambda: all_pages_are_free(narrow))
        assert intake.counts.num_reopened == 1
