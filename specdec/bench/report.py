"""The report of a run: its JSON has exactly these fields, and one that changes its meaning changes `schema_version`.

Times are milliseconds where the name ends in `_ms` and seconds in `_s`; shares lie between 0 and 1; null is what was
not told or does not exist. Percentiles are over all samples, interpolated linearly between the two nearest.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

SCHEMA_VERSION = 1


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one quantity."""

    num_samples: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> "Summary | None":
        """Summarise seconds in milliseconds; None without samples."""
        if not samples_s:
            return None
        samples_ms = np.array(samples_s) * 1000
        p50, p90, p95, p99 = np.percentile(samples_ms, (50, 90, 95, 99)).tolist()
        return cls(
            num_samples=len(samples_s),
            mean=float(samples_ms.mean()),
            p50=p50,
            p90=p90,
            p95=p95,
            p99=p99,
            max=float(samples_ms.max()),
        )


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and how it was spoken to: `prompt_form` is ids, text or chat."""

    url: str
    model: str
    prompt_form: str


class WorkloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was to be sent; `planned_prompt_tokens` is null for questions."""

    kind: str
    source: str
    num_sessions: int
    num_requests: int
    planned_prompt_tokens: int | None
    planned_output_tokens: int
    scale_length: float


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How it was sent: `arrivals` is trace, poisson, fixed or closed."""

    arrivals: str
    rate_per_s: float | None
    concurrency: int | None
    speed: float
    max_think_time_s: float | None
    seed: int


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Failed requests of one kind, and what was said about the first."""

    count: int
    example: str


class RequestsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where the requests ended; without those of the warm-up.

    `unfinished` were under way when the run ended, `skipped` waited for a reply that failed, `not_sent` is the rest.
    `most_at_once` counts those under way at the same time. `errors` is by kind: http_STATUS, connection, cut_stream,
    timeout, error_in_stream, bad_stream.
    """

    completed: int
    failed: int
    unfinished: int
    skipped: int
    not_sent: int
    most_at_once: int
    errors: dict[str, ErrorReport]


class TokensReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the completed requests."""

    prompt: int
    output: int


class ThroughputReport(msgspec.Struct, frozen=True, kw_only=True):
    """Of the completed requests, over the time from the first one sent to the last end."""

    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float


class LatencyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of the completed requests; `request_record.py` defines them.

    `itl_token_ms` is null unless every stream tells the tokens of each chunk; `start_delay_ms` is how late the client
    itself sent requests, and should be near 0.
    """

    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_chunk_ms: Summary | None
    itl_token_ms: Summary | None
    e2e_ms: Summary | None
    start_delay_ms: Summary | None


class GoodputReport(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met the objectives; `share` is of all that completed or failed."""

    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    num_good: int
    share: float
    requests_per_s: float


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that a prefix cache had: `source` is usage, metrics or none.

    `reusable_share` is what a cache could have had at best; null for questions.
    """

    source: str
    hit_rate: float | None
    reusable_share: float | None


class AcceptanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Draft tokens: `source` is usage, metrics or none.

    `tokens_per_pass` is output tokens by (output - accepted) tokens, the passes that gave them; `acceptance_length` is
    1 + accepted by drafts, of /metrics alone, since usage does not tell the number of drafts.
    """

    source: str
    num_accepted: int | None
    num_rejected: int | None
    rate: float | None
    tokens_per_pass: float | None
    acceptance_length: float | None
    rate_per_position: list[float]


class CategoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Completed requests of one category of questions."""

    num_requests: int
    output_tokens: int
    mean_tpot_ms: float | None
    acceptance_rate: float | None
    tokens_per_pass: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run; `end` is complete, interrupted or server gone."""

    schema_version: int
    end: str
    end_detail: str
    duration_s: float
    num_warmup: int
    server: ServerReport
    workload: WorkloadReport
    load: LoadReport
    requests: RequestsReport
    tokens: TokensReport
    throughput: ThroughputReport
    latency: LatencyReport
    goodput: GoodputReport | None
    prefix: PrefixReport
    acceptance: AcceptanceReport
    categories: dict[str, CategoryReport]


def as_json(report: Report) -> str:
    """Give the report as one indented JSON object."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
