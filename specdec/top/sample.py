"""What is shown of a server at one time: its JSON has exactly these fields; null is what the server does not tell."""

from enum import StrEnum

import msgspec

from specdec.top.activity import Activity, Window
from specdec.top.history import History
from specdec.top.reading import Reading


class ServerState(StrEnum):
    """Whether a server can be used."""

    READY = "ready"
    NOT_READY = "not ready"  # it lives, and lets nothing in: it drains
    UNHEALTHY = "unhealthy"
    GONE = "gone"  # it does not answer


class Pages(msgspec.Struct, frozen=True, kw_only=True):
    """KV pages: running requests hold `used`, `cached` are only kept for later prompts, nobody holds `free`.

    `quarantined` are pages that nobody uses but a prefill may still write to.
    """

    used: int
    cached: int
    free: int
    quarantined: int

    @property
    def total(self) -> int:
        """Pages of the pool."""
        return self.used + self.cached + self.free

    @classmethod
    def of(cls, reading: Reading) -> "Pages | None":
        """Read them out of the gauges; None where the server does not count pages."""
        used, cached, free = (reading.gauge("kv_pages", state=state) for state in ("used", "cached", "free"))
        if used is None or cached is None or free is None:
            return None
        quarantined = reading.gauge("kv_pages_quarantined") or 0.0
        return cls(used=int(used), cached=int(cached), free=int(free), quarantined=int(quarantined))


class PrefillStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill as a decode server sees it: its state, and the tokens that it was given and has not computed."""

    address: str
    state: str
    queued_tokens: int | None

    @classmethod
    def all_of(cls, reading: Reading) -> "list[PrefillStatus]":
        """Read them out of the gauges, by address; empty for a server without prefills."""
        return [
            cls(
                address=labels["prefill"],
                state=labels["state"],
                queued_tokens=_gauge(reading, "prefill_queued_tokens", prefill=labels["prefill"]),
            )
            for labels, value in reading.gauges_named("prefill_state")
            if value and labels.keys() == {"prefill", "state"}
        ]


class ServerSample(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one time.

    `detail` says why it is not ready or what it lacks. `num_restarts` counts those that were seen. `num_groups` counts
    decode groups whose line is up, `num_transfers` their prompts that are being computed or sent. Without an answer
    there is nothing but the state.
    """

    url: str
    state: ServerState
    detail: str = ""
    model: str = ""
    num_restarts: int = 0
    num_running: int | None = None
    num_waiting: int | None = None
    pages: Pages | None = None
    prefills: list[PrefillStatus] = []
    num_groups: int | None = None
    num_transfers: int | None = None
    window: Window | None = None
    since_start: Activity | None = None

    @classmethod
    def of(cls, url: str, state: ServerState, detail: str, history: History) -> "ServerSample":
        """Say what the last readings tell.

        Args:
            url: Of the server.
            state: Of the server.
            detail: Why it is so.
            history: Its readings, of which there is one at least.
        """
        reading = history.newest
        assert reading is not None
        return cls(
            url=url,
            state=state,
            detail=detail,
            model=reading.model_name,
            num_restarts=history.num_restarts,
            num_running=_gauge(reading, "num_requests_running"),
            num_waiting=_gauge(reading, "num_requests_waiting"),
            pages=Pages.of(reading),
            prefills=PrefillStatus.all_of(reading),
            num_groups=_gauge(reading, "decode_groups"),
            num_transfers=_gauge(reading, "transfers_running"),
            window=Window.of(history),
            since_start=Activity.of(reading.counts),
        )


def _gauge(reading: Reading, name: str, **labels: str) -> int | None:
    value = reading.gauge(name, **labels)
    return None if value is None else int(value)
