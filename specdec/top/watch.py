"""Several servers, each asked at its own pace: one that hangs does not hold up the others."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NoReturn

from specdec.top.sample import ServerSample
from specdec.top.watched_server import WatchedServer


async def watch(
    servers: Sequence[WatchedServer], on_samples: Callable[[Sequence[ServerSample]], None], *, interval_s: float
) -> NoReturn:
    """Ask until the task is cancelled, and close the connections then.

    Args:
        servers: Whom to ask.
        on_samples: Gets the newest sample of each server, in their order, whenever there is a new one; first when all
            have answered or are known to be gone.
        interval_s: Seconds from one question to the next; a server that takes longer is asked again at once.
    """
    newest: list[ServerSample | None] = [None] * len(servers)

    async def ask_for_ever(place: int) -> NoReturn:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            newest[place] = await servers[place].sample()
            samples = [sample for sample in newest if sample is not None]
            if len(samples) == len(servers):
                on_samples(samples)
            due_s = max(due_s + interval_s, loop.time())
            await asyncio.sleep(due_s - loop.time())

    try:
        await asyncio.gather(*map(ask_for_ever, range(len(servers))))
    finally:
        await _close(servers)
    raise AssertionError("what asks for ever has ended")


async def sample_once(servers: Sequence[WatchedServer], *, interval_s: float) -> list[ServerSample]:
    """Ask every server twice, since rates are between two times, and close the connections."""
    try:
        await asyncio.gather(*(server.sample() for server in servers))
        await asyncio.sleep(interval_s)
        return await asyncio.gather(*(server.sample() for server in servers))
    finally:
        await _close(servers)


async def _close(servers: Sequence[WatchedServer]) -> None:
    await asyncio.gather(*(server.close() for server in servers))
