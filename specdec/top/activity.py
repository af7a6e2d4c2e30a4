"""What a server did, read out of what it counted; part of the JSON of a sample.

Times are milliseconds where the name ends in `_ms` and seconds in `_s`; shares lie between 0 and 1; null is what the
server does not tell, or what nothing was counted of.
"""

from collections.abc import Mapping

import msgspec

from specdec.top.history import History
from specdec.top.quantile import bucket_quantile
from specdec.top.reading import Counts


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
    at each position. `prefill_prompts` counts prompts asked of prefills by outcome, `transfers` those that decode
    groups asked of this server; `transfer_bytes` is the KV written to groups.
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
    transfers: dict[str, int]
    transfer_bytes: int | None

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
            transfers=_whole(counts.by_label("transfers_total", "outcome")),
            transfer_bytes=_count(counts, "transfer_bytes_total"),
        )


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The time just gone: its length, rates over it, and what was done in it."""

    duration_s: float
    ended_per_s: float
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    transfer_bytes_per_s: float | None
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
            transfer_bytes_per_s=_rate(activity.transfer_bytes, duration_s),
            activity=activity,
        )


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
