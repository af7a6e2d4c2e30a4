"""From the records of a run to the figures of its report."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specdec.bench.report import (
    AcceptanceReport,
    CategoryReport,
    ErrorReport,
    GoodputReport,
    LatencyReport,
    PrefixReport,
    RequestsReport,
    Summary,
    ThroughputReport,
    TokensReport,
)
from specdec.bench.request_record import Outcome, RequestRecord
from specdec.bench.server_counters import ServerCounters
from specdec.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Objectives:
    """Service level objectives of a request, in milliseconds; None for one that is not set."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, f"{name}_ms")
            if value is not None and not value > 0:
                raise ConfigError(f"--slo-{name} must be above 0 milliseconds, got {value}")

    @property
    def are_set(self) -> bool:
        """Whether there is one."""
        return self.ttft_ms is not None or self.tpot_ms is not None

    def are_met_by(self, record: RequestRecord) -> bool:
        """Whether a request completed in time; a reply of one token cannot miss a TPOT, one of none meets nothing."""
        if record.outcome is not Outcome.COMPLETED or record.ttft_s is None:
            return False
        is_prompt = self.ttft_ms is None or record.ttft_s * 1000 <= self.ttft_ms
        return is_prompt and (self.tpot_ms is None or (record.tpot_s or 0.0) * 1000 <= self.tpot_ms)


def completed(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests that ended well."""
    return [record for record in records if record.outcome is Outcome.COMPLETED]


def duration_s(records: Sequence[RequestRecord]) -> float:
    """Seconds from the first request sent to the last end; 0 without requests."""
    if not records:
        return 0.0
    return max(record.ended_s for record in records) - min(record.sent_s for record in records)


def count_requests(records: Sequence[RequestRecord], *, num_planned: int, num_skipped: int) -> RequestsReport:
    """Tell where the requests ended."""
    outcomes = Counter(record.outcome for record in records)
    failed = [record for record in records if record.outcome is Outcome.FAILED]
    kinds = Counter(record.error_kind for record in failed)
    examples = {record.error_kind: record.error_detail for record in reversed(failed)}
    # At the same moment ends count before beginnings: a reply and the request that waited for it are not at once.
    changes = sorted([(record.sent_s, 1) for record in records] + [(record.ended_s, -1) for record in records])
    num_running = most_at_once = 0
    for _, change in changes:
        num_running += change
        most_at_once = max(most_at_once, num_running)
    return RequestsReport(
        completed=outcomes[Outcome.COMPLETED],
        failed=outcomes[Outcome.FAILED],
        unfinished=outcomes[Outcome.UNFINISHED],
        skipped=num_skipped,
        not_sent=num_planned - len(records) - num_skipped,
        most_at_once=most_at_once,
        errors={kind: ErrorReport(count=count, example=examples[kind]) for kind, count in sorted(kinds.items())},
    )


def count_tokens(done: Iterable[RequestRecord]) -> TokensReport:
    """Add up the tokens of completed requests."""
    pairs = [(record.num_prompt_tokens, record.num_output_tokens) for record in done]
    return TokensReport(prompt=sum(prompt for prompt, _ in pairs), output=sum(output for _, output in pairs))


def measure_throughput(done: Sequence[RequestRecord], seconds: float) -> ThroughputReport:
    """Divide by the duration of the run; 0 for none."""
    tokens = count_tokens(done)
    return ThroughputReport(
        requests_per_s=_ratio(len(done), seconds) or 0.0,
        prompt_tokens_per_s=_ratio(tokens.prompt, seconds) or 0.0,
        output_tokens_per_s=_ratio(tokens.output, seconds) or 0.0,
    )


def measure_latency(done: Sequence[RequestRecord]) -> LatencyReport:
    """Summarise the latencies of completed requests.

    Those by token need the tokens of every chunk. Where some streams tell them and some do not, there are none: the
    ones that tell might be those that came token by token, without an accepted draft, and stand for nothing else.
    """

    def each(value: Callable[[RequestRecord], float | None]) -> Summary | None:
        return Summary.of([sample for record in done if (sample := value(record)) is not None])

    tell_tokens = all(record.tokens_per_chunk is not None for record in done)
    return LatencyReport(
        ttft_ms=each(lambda record: record.ttft_s),
        tpot_ms=each(lambda record: record.tpot_s),
        itl_chunk_ms=Summary.of([gap_s for record in done for gap_s in record.chunk_gaps_s()]),
        itl_token_ms=Summary.of([gap_s for record in done for gap_s in record.token_gaps_s()] if tell_tokens else []),
        e2e_ms=each(lambda record: record.e2e_s),
        start_delay_ms=each(lambda record: record.start_delay_s),
    )


def measure_goodput(records: Sequence[RequestRecord], objectives: Objectives, seconds: float) -> GoodputReport | None:
    """Count the requests that met the objectives; None without objectives."""
    if not objectives.are_set:
        return None
    num_good = sum(map(objectives.are_met_by, records))
    num_ended = sum(record.outcome is not Outcome.UNFINISHED for record in records)
    return GoodputReport(
        slo_ttft_ms=objectives.ttft_ms,
        slo_tpot_ms=objectives.tpot_ms,
        num_good=num_good,
        share=_ratio(num_good, num_ended) or 0.0,
        requests_per_s=_ratio(num_good, seconds) or 0.0,
    )


def measure_prefix(
    done: Sequence[RequestRecord], counters: ServerCounters, *, reusable_share: float | None
) -> PrefixReport:
    """Tell what the prefix cache had; servers leave the field away where it is 0, so one that has it anywhere tells."""
    if any(record.usage.num_cached is not None for record in done):
        num_cached = sum(record.usage.num_cached or 0 for record in done)
        hit_rate = _ratio(num_cached, count_tokens(done).prompt)
        return PrefixReport(source="usage", hit_rate=hit_rate, reusable_share=reusable_share)
    hit_rate = counters.prefix_hit_rate
    source = "none" if hit_rate is None else "metrics"
    return PrefixReport(source=source, hit_rate=hit_rate, reusable_share=reusable_share)


def measure_acceptance(done: Sequence[RequestRecord], counters: ServerCounters) -> AcceptanceReport:
    """Tell what became of the drafts."""
    source, num_accepted, num_rejected, tokens_per_pass = "none", None, None, None
    num_drafts = counters.num_drafts
    telling = [record for record in done if record.usage.num_accepted is not None]
    if telling:
        source, num_accepted, num_rejected, tokens_per_pass = "usage", *_drafts_of(telling)
    elif counters.num_accepted_tokens is not None and counters.num_draft_tokens is not None:
        source, num_accepted = "metrics", counters.num_accepted_tokens
        num_rejected = counters.num_draft_tokens - num_accepted
    length = None
    if num_drafts and counters.num_accepted_tokens is not None:
        length = 1 + counters.num_accepted_tokens / num_drafts
    return AcceptanceReport(
        source=source,
        num_accepted=num_accepted,
        num_rejected=num_rejected,
        rate=_acceptance_rate(num_accepted, num_rejected),
        tokens_per_pass=tokens_per_pass,
        acceptance_length=length,
        rate_per_position=[count / num_drafts for count in counters.accepted_per_position] if num_drafts else [],
    )


def measure_categories(done: Sequence[RequestRecord]) -> dict[str, CategoryReport]:
    """Tell of each category of questions; empty where there are none."""
    categories = {}
    for name in sorted({record.category for record in done} - {""}):
        members = [record for record in done if record.category == name]
        telling = [record for record in members if record.usage.num_accepted is not None]
        num_accepted, num_rejected, tokens_per_pass = _drafts_of(telling)
        tpots = Summary.of([record.tpot_s for record in members if record.tpot_s is not None])
        categories[name] = CategoryReport(
            num_requests=len(members),
            output_tokens=count_tokens(members).output,
            mean_tpot_ms=None if tpots is None else tpots.mean,
            acceptance_rate=_acceptance_rate(num_accepted, num_rejected),
            tokens_per_pass=tokens_per_pass,
        )
    return categories


def _drafts_of(telling: Sequence[RequestRecord]) -> tuple[int, int, float | None]:
    """Accepted and rejected drafts, and output tokens for each pass, of requests that tell."""
    num_accepted = sum(record.usage.num_accepted or 0 for record in telling)
    num_rejected = sum(record.usage.num_rejected or 0 for record in telling)
    num_output = count_tokens(telling).output
    return num_accepted, num_rejected, _ratio(num_output, num_output - num_accepted)


def _acceptance_rate(num_accepted: int | None, num_rejected: int | None) -> float | None:
    if num_accepted is None or num_rejected is None:
        return None
    return _ratio(num_accepted, num_accepted + num_rejected)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
