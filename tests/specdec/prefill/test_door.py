"""What decode groups say comes to the rounds in order and whole, however much of it there is."""

import threading

from specdec.prefill.door import Door
from specdec.transfer.messages import Ask, Hello
from tests.support.scripted_prefill import DECODE_EPOCH, PREFILL_EPOCH, WAIT_S, call

NUM_MESSAGES = 700


def test_messages_are_taken_some_at_a_time_in_order_and_none_is_lost() -> None:
    door = Door("127.0.0.1:0")
    has_news = threading.Event()
    door.open(has_news.set)
    with call(door.address) as wire:
        names = {"decode_epoch": DECODE_EPOCH, "prefill_epoch": PREFILL_EPOCH}
        for transfer_id in range(NUM_MESSAGES):
            wire.send(Ask(transfer_id=transfer_id, **names))
        assert has_news.wait(WAIT_S)
        taken = door.take(wait_s=WAIT_S)
        while len(taken) <= NUM_MESSAGES:
            more = door.take(wait_s=WAIT_S)
            assert 0 < len(more) < NUM_MESSAGES // 2
            taken += more
    hello, *asks = (told.message for told in taken)
    assert isinstance(hello, Hello)
    assert [ask.transfer_id for ask in asks if isinstance(ask, Ask)] == list(range(NUM_MESSAGES))
    (over,) = door.take(wait_s=WAIT_S)
    assert over.message is None
    door.hang_up(over.session)
    assert not door.is_open(over.session)
    door.close()


def test_nothing_is_let_in_before_it_is_open_or_after_it_is_closed() -> None:
    door = Door("127.0.0.1:0")
    with call(door.address) as early:
        assert door.take(wait_s=0.05) == []
        door.open(lambda: None)
        (told,) = door.take(wait_s=WAIT_S)
        assert isinstance(told.message, Hello)
        assert [session is told.session for session in door.sessions] == [True]
        door.close()
        early.receive_end()


def test_whoever_waits_is_woken() -> None:
    door = Door("127.0.0.1:0")
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(door.take(wait_s=10 * WAIT_S)))
    thread.start()
    door.wake()
    thread.join(WAIT_S)
    assert taken == [[]]
    door.close()
