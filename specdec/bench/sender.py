"""Send one planned request and follow its reply."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from specdec.bench.prompt_writer import PromptWriter, ReplyContent
from specdec.bench.reply_stream import ReplyStream, StreamFault
from specdec.bench.request_record import Outcome, RequestRecord
from specdec.bench.server import Server, error_detail
from specdec.bench.workload import PlannedRequest

CONNECTION = "connection"
CUT_STREAM = "cut_stream"
TIMEOUT = "timeout"


LOST_CONNECTION = frozenset({CONNECTION, CUT_STREAM})  # what is seen of a server that is no longer there


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A request that was sent, and what came back.

    Attributes:
        record: Its times and counts.
        content: The reply; only that of a completed request is whole.
    """

    record: RequestRecord
    content: ReplyContent


class Sender:
    """Sends requests to a server, any number at the same time. Times are those of the running event loop.

    Args:
        server: Where to.
        writer: Writes the prompts.
        fields: What every request has beside its prompt and its number of tokens.
        timeout_s: Seconds from sending to the end of a reply.
    """

    def __init__(self, server: Server, writer: PromptWriter, *, fields: Mapping[str, Any], timeout_s: float) -> None:
        self._server = server
        self._writer = writer
        self._fields = dict(fields)
        self._timeout_s = timeout_s

    async def send(
        self,
        request: PlannedRequest,
        *,
        session: str,
        replies: Mapping[int, ReplyContent],
        due_s: float,
        on_record: Callable[[RequestRecord], None],
    ) -> Exchange:
        """Send a request and wait until it has ended, well or not.

        Args:
            request: What to send.
            session: Name of its session.
            replies: Replies of the session that the prompt may contain.
            due_s: When it should be sent.
            on_record: Receives the record when the request has ended, also if the task is cancelled meanwhile.
        """
        # Written here and not ahead: prompts of a whole trace would not fit in memory. 100,000 tokens take about 10 ms,
        # in which other replies are read late.
        prompt = self._writer.write(request, replies)
        body = msgspec.json.encode({**self._fields, **prompt, "max_tokens": request.num_output_tokens})
        clock = asyncio.get_running_loop().time
        stream = ReplyStream()
        outcome, kind, detail = Outcome.UNFINISHED, "", ""
        sent_s = clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._follow(body, stream)
            outcome = Outcome.COMPLETED
        except TimeoutError:
            outcome, kind, detail = Outcome.FAILED, TIMEOUT, f"no end of the reply within {self._timeout_s:g} s"
        except StreamFault as fault:
            outcome, kind, detail = Outcome.FAILED, fault.kind, fault.detail
        except httpx2.HTTPError as error:
            outcome, kind, detail = Outcome.FAILED, CONNECTION, _reason(error)
        finally:
            record = RequestRecord(
                request_index=request.index,
                session=session,
                category=request.category,
                outcome=outcome,
                error_kind=kind,
                error_detail=detail,
                finish_reason=stream.finish_reason,
                num_planned_prompt=request.num_prompt_tokens,
                num_planned_output=request.num_output_tokens,
                due_s=due_s,
                sent_s=sent_s,
                ended_s=clock(),
                chunks_s=tuple(stream.chunks_s),
                tokens_per_chunk=stream.tokens_per_chunk,
                usage=stream.usage,
            )
            on_record(record)
        return Exchange(record=record, content=stream.content)

    async def _follow(self, body: bytes, stream: ReplyStream) -> None:
        clock = asyncio.get_running_loop().time
        client = self._server.client
        headers = {"Content-Type": "application/json"}
        async with client.sse(self._writer.form.path, method="POST", content=body, headers=headers) as events:
            response = events.response
            if response.status_code != 200:
                await response.aread()
                raise StreamFault(f"http_{response.status_code}", error_detail(response.text))
            try:
                async for event in events:
                    if event.data:
                        stream.push(event.data, clock())
            except httpx2.SSEError as error:
                raise StreamFault("bad_stream", str(error)) from error
            except httpx2.TransportError as error:
                raise StreamFault(CUT_STREAM, _reason(error)) from error
        if not stream.is_whole:
            raise StreamFault(CUT_STREAM, "the stream ended without a finish_reason")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
