"""What a client does to a generation: it may leave, and then nothing is generated for it any more."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from specdec.serving.generation import Generation
from specdec.serving.web.body import client_gone


@asynccontextmanager
async def bound_to_client(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Close a generation at the end of the block, or as soon as the client has left; then reading it fails."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abort(client_gone())

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        generation.close()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
