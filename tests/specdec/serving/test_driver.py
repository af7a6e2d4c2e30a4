"""The thread that runs the rounds."""

import asyncio
import threading
from typing import Any

import pytest

from specdec.errors import RankLostError
from specdec.result import StreamDelta
from specdec.serving.driver import EngineDriver, Piece
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import wait_until


def delta(**fields: Any) -> StreamDelta:
    return StreamDelta(**{"index": 0, "text": "", "token_ids": (), "logprobs": None, "finish_reason": None, **fields})


def test_it_sleeps_while_there_is_nothing_to_do(engine: FakeEngine) -> None:
    async def run() -> None:
        driver = EngineDriver(engine)
        driver.start(asyncio.get_running_loop(), on_failure=lambda: None)
        await asyncio.sleep(0.3)
        assert engine.num_steps == 1
        driver.wake()
        await asyncio.sleep(0.1)
        assert engine.num_steps == 2
        driver.stop()

    asyncio.run(run())


def test_a_turn_is_called_again_when_it_wants_to_be_and_when_something_was_posted(engine: FakeEngine) -> None:
    async def run() -> None:
        waits: list[float | None] = [0.0, 0.05, None]
        called = []

        def turn() -> float | None:
            called.append(threading.current_thread().name)
            return waits[min(len(called), len(waits)) - 1]

        driver = EngineDriver(engine, turn=turn)
        driver.start(asyncio.get_running_loop(), on_failure=lambda: None)
        await asyncio.sleep(0.3)
        assert called == ["specdec-rounds"] * 3
        driver.wake()
        await asyncio.sleep(0.1)
        assert len(called) == 4
        driver.stop()
        assert engine.num_steps == 0

    asyncio.run(run())


def test_pieces_of_one_round_come_together_and_in_order(engine: FakeEngine) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        driver = EngineDriver(engine)
        received: list[list[int]] = [[], []]
        receivers = [
            lambda piece: received[0].append(piece.prompt_index),
            lambda piece: received[1].append(piece.prompt_index),
        ]
        loop_thread = threading.get_ident()
        threads = set()

        def note(piece: Piece) -> None:
            threads.add(threading.get_ident())
            receivers[piece.prompt_index % 2](piece)

        driver.start(loop, on_failure=lambda: None)
        driver.post(lambda: [driver.deliver(note, index, delta()) for index in range(6)] and None)
        while len(received[0]) + len(received[1]) < 6:
            await asyncio.sleep(0.005)
        assert received == [[0, 2, 4], [1, 3, 5]]
        assert threads == {loop_thread}
        driver.stop()

    asyncio.run(run())


def test_reading_happens_between_rounds(engine: FakeEngine) -> None:
    async def run() -> None:
        driver = EngineDriver(engine)
        driver.start(asyncio.get_running_loop(), on_failure=lambda: None)
        names = await asyncio.wrap_future(driver.call(lambda: threading.current_thread().name))
        assert names == "specdec-rounds"

        def fail() -> None:
            raise KeyError("of the reader")

        with pytest.raises(KeyError):
            await asyncio.wrap_future(driver.call(fail))
        driver.check()
        driver.stop()

    asyncio.run(run())


def test_it_tells_when_it_has_ended_by_itself(engine: FakeEngine) -> None:
    async def run() -> None:
        driver = EngineDriver(engine)
        ended = asyncio.Event()

        def fail() -> None:
            raise ValueError("what no action may do")

        driver.start(asyncio.get_running_loop(), on_failure=ended.set)
        driver.post(fail)
        await asyncio.wait_for(ended.wait(), 10)
        with pytest.raises(RuntimeError, match="ValueError"):
            driver.check()
        driver.stop()

    asyncio.run(run())


def test_check_asks_the_engine(engine: FakeEngine) -> None:
    driver = EngineDriver(engine)
    driver.check()
    engine.lost = RankLostError("gone")
    with pytest.raises(RankLostError):
        driver.check()
    driver.stop()  # it was never started


def test_closed_loop_is_no_failure(engine: FakeEngine) -> None:
    driver = EngineDriver(engine)

    async def run() -> None:
        driver.start(asyncio.get_running_loop(), on_failure=lambda: None)

    asyncio.run(run())
    driver.post(lambda: driver.deliver(lambda _piece: None, 0, delta()))
    wait_until(lambda: engine.num_steps >= 2, "a round")
    driver.stop()
    assert driver.failure is None
