"""What is shown of a server: its JSON has exactly these fields.

Times are milliseconds where the name ends in `_ms` and seconds in `_s`; shares lie between 0 and 1; null is what the
server does not tell, or what nothing was counted of.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from specdec.top.history import History
from specdec.top.quantile import bucket_quantile
from specdec.top.reading import Counts, Reading


class ServerState(StrEnum):
    """Whether a server can be used."""

    READY = "ready"
    NOT_READY = "not ready"  # it lives, and lets nothing in: it drains
    UNHEALTHY = "unhealthy"
    GONE = "gone"  # it does not answer


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of a latency, estimated from the buckets of a histogram."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, counts: Counts, name: str) -> "Percentiles | None":
        """Give those of a histogram of seconds; None without observations."""
        count_by_bound = counts.count_by_bound(name)
        p50, p90, p99 = (bucket_quantile(count_by_bound, share) for share in (0.5, 0.9, 0.99))
        if p50 is None or p90 is None or p99 is None:
            return None
        return cls(p50=p50 * 1000, p90=p90 * 1000, p99=p99 * 1000)


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """What a server did in a window, or since it began.

    `ended` counts choices by reason. `itl_ms` is between two rounds that gave a request tokens. `acceptance_length` is
    1 + accepted drafts by rounds that drafted, `acceptance_by_position` the share of these rounds that kept the draft
    at each position. `prefill_prompts` counts prompts asked of prefills by outcome.
    """

    ended: dict[str, int]
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    queue_ms: Percentiles | None
    acceptance_length: float | None
    acceptance_by_position: list[float]
    prefix_hit_rate: float | None
    num_preemptions: int | None
    prefill_prompts: dict[str, int]

    @classmethod
    def of(cls, counts: Counts) -> "Activity":
        """Read it out of what was counted."""
        num_drafts = counts.total("spec_decode_num_drafts_total") or 0.0
        num_accepted = counts.total("spec_decode_num_accepted_tokens_total")
        by_position = counts.by_label("spec_decode_num_accepted_tokens_per_pos_total", "position")
        num_hits, num_looked_up = counts.total("prefix_cache_hits_total"), counts.total("prefix_cache_queries_total")
        return cls(
            ended=_whole(counts.by_label("request_success_total", "finished_reason")),
            prompt_tokens=_count(counts, "prompt_tokens_total"),
            output_tokens=_count(counts, "generation_tokens_total"),
            ttft_ms=Percentiles.of(counts, "time_to_first_token_seconds"),
            itl_ms=Percentiles.of(counts, "inter_token_latency_seconds"),
            queue_ms=Percentiles.of(counts, "request_queue_time_seconds"),
            acceptance_length=1 + num_accepted / num_drafts if num_accepted is not None and num_drafts else None,
            acceptance_by_position=_by_place(by_position, num_drafts) if num_drafts else [],
            prefix_hit_rate=num_hits / num_looked_up if num_hits is not None and num_looked_up else None,
            num_preemptions=_count(counts, "num_preemptions_total"),
            prefill_prompts=_whole(counts.by_label("prefill_prompts_total", "outcome")),
        )


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The time just gone: its length, rates over it, and what was done in it."""

    duration_s: float
    ended_per_s: float
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    activity: Activity

    @classmethod
    def of(cls, history: History) -> "Window | None":
        """Read it out of the last readings; None while there is one only."""
        duration_s = history.duration_s
        if not duration_s:
            return None
        activity = Activity.of(history.counts)
        return cls(
            duration_s=duration_s,
            ended_per_s=sum(activity.ended.values()) / duration_s,
            prompt_tokens_per_s=_rate(activity.prompt_tokens, duration_s),
            output_tokens_per_s=_rate(activity.output_tokens, duration_s),
            activity=activity,
        )


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


class ServerSample(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one time.

    `detail` says why it is not ready or what it lacks. `num_restarts` counts those that were seen. Without an answer
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
    window: Window | None = None
    since_start: Activity | None = None


def _count(counts: Counts, name: str) -> int | None:
    value = counts.total(name)
    return None if value is None else int(value)


def _whole(values: Mapping[str, float]) -> dict[str, int]:
    return {key: int(value) for key, value in values.items()}


def _by_place(count_by_position: Mapping[str, float], num_drafts: float) -> list[float]:
    """Divide by the rounds; positions that are missing accepted nothing."""
    counts = {int(position): count for position, count in count_by_position.items() if position.isdecimal()}
    return [counts.get(place, 0.0) / num_drafts for place in range(max(counts, default=-1) + 1)]


def _rate(count: int | None, duration_s: float) -> float | None:
    return None if count is None else count / duration_s
