"""Streams as they come over a wire: cut anywhere, with comments, and with what is no stream at all."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import httpx2
import pytest

from specdec.bench.prompt_writer import PromptForm, PromptWriter
from specdec.bench.request_record import Outcome, RequestRecord
from specdec.bench.sender import Exchange, Sender
from specdec.bench.server import Server
from specdec.bench.workload import Blocks, PlannedRequest
from tests.support.virtual_time import run_virtually

REQUEST = PlannedRequest(
    index=0, prompt=(Blocks(block_numbers=(0,), block_tokens=4, num_tokens=4),), num_output_tokens=3
)
EVENTS = (
    b': a comment\r\n\r\ndata: {"choices": [{"text": "\xe2\x82\xac\xe2\x80\xa8", "token_ids": [1]}]}\r\n\r\n'
    b'event: ping\ndata:\n\nid: 7\ndata: {"choices": [{"text": "b",\ndata: "token_ids": [2, 3]}]}\n\n'
    b'data: {"choices": [{"text": "", "token_ids": [], "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
)
END_OF_FIRST = EVENTS.index(b"\r\n\r\n", EVENTS.index(b"choices")) + 4
END_OF_SECOND = EVENTS.index(b"[2, 3]}]}\n\n") + 11


class Wire(httpx2.AsyncBaseTransport):
    """Answers with pieces that come a second apart."""

    def __init__(self, *pieces: bytes, kind: str = "text/event-stream", status: int = 200) -> None:
        self._pieces, self._kind, self._status = pieces, kind, status

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        del request
        return httpx2.Response(self._status, headers={"content-type": self._kind}, stream=_Pieces(self._pieces))


class _Pieces(httpx2.AsyncByteStream):
    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            await asyncio.sleep(1.0)
            yield piece


def send(wire: Wire, *, timeout_s: float = 600.0) -> Exchange:
    async def exchange() -> Exchange:
        server = Server("http://wire", transport=wire)
        writer = PromptWriter(PromptForm.TEXT, vocabulary=(), num_blocks=1, seed=0)
        sender = Sender(server, writer, fields={"model": "m"}, timeout_s=timeout_s)
        kept: list[RequestRecord] = []
        due_s = asyncio.get_running_loop().time()
        result = await sender.send(REQUEST, session="", replies={}, due_s=due_s, on_record=kept.append)
        assert kept == [result.record]
        await server.close()
        return result

    return run_virtually(exchange())


def test_several_events_of_one_read_come_at_the_same_time() -> None:
    exchange = send(Wire(EVENTS))
    assert exchange.record.outcome is Outcome.COMPLETED
    assert [chunk_s - exchange.record.sent_s for chunk_s in exchange.record.chunks_s] == [1.0, 1.0]
    assert exchange.record.tokens_per_chunk == (1, 2)
    assert exchange.content.text == "€\u2028b"
    assert exchange.record.finish_reason == "stop"


def test_an_event_comes_when_its_last_byte_does() -> None:
    for place in range(1, len(EVENTS)):
        exchange = send(Wire(EVENTS[:place], EVENTS[place:]))
        record = exchange.record
        assert (record.outcome, record.tokens_per_chunk) == (Outcome.COMPLETED, (1, 2))
        assert exchange.content.text == "€\u2028b"
        expected = [1.0 if place >= end else 2.0 for end in (END_OF_FIRST, END_OF_SECOND)]
        assert [chunk_s - record.sent_s for chunk_s in record.chunks_s] == expected


@pytest.mark.parametrize(
    ("wire", "kind", "detail"),
    [
        (Wire(b"data: {\n\n"), "bad_stream", "truncated"),
        (Wire(b'{"choices": []}', kind="application/json"), "bad_stream", "text/event-stream"),
        (Wire(EVENTS[:END_OF_FIRST]), "cut_stream", "without a finish_reason"),
        (Wire(), "cut_stream", "without a finish_reason"),
        (Wire(b"<html>" + 400 * b"x", status=502, kind="text/html"), "http_502", "<html>xxx"),
        (Wire(b'{"error": "plain"}', status=400), "http_400", '{"error": "plain"}'),
        (Wire(b'{"error": {"message": "two\\nlines"}}', status=400), "http_400", "two lines"),
    ],
)
def test_what_is_no_whole_stream_is_an_error_of_its_kind(wire: Wire, kind: str, detail: str) -> None:
    record = send(wire).record
    assert (record.outcome, record.error_kind) == (Outcome.FAILED, kind)
    assert detail in record.error_detail
    assert len(record.error_detail) <= 300


def test_a_reply_that_takes_too_long_is_given_up() -> None:
    record = send(Wire(*[EVENTS[:END_OF_FIRST]] * 9), timeout_s=2.5).record
    assert (record.outcome, record.error_kind) == (Outcome.FAILED, "timeout")
    assert record.ended_s - record.sent_s == 2.5
    assert len(record.chunks_s) == 2
