"""The report of a benchmark as tables."""

from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from specdec.bench.report import Report

_LATENCIES = (
    ("TTFT", "ttft_ms"),
    ("TPOT", "tpot_ms"),
    ("ITL by chunk", "itl_chunk_ms"),
    ("ITL by token", "itl_token_ms"),
    ("end to end", "e2e_ms"),
    ("start delay", "start_delay_ms"),
)


def report_tables(report: "Report") -> Group:
    """Give the report for a terminal."""
    tables = [_latency_table(report), _fact_table(report)]
    if report.requests.errors:
        tables.append(_error_table(report))
    if report.categories:
        tables.append(_category_table(report))
    return Group(*tables)


def _latency_table(report: "Report") -> Table:
    table = Table(title=f"{report.requests.completed} completed requests, milliseconds", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("mean", "p50", "p90", "p95", "p99", "max", "samples"):
        table.add_column(name, justify="right", no_wrap=True)
    for title, name in _LATENCIES:
        summary = getattr(report.latency, name)
        if summary is None:
            table.add_row(title, *[""] * 6, "0")
            continue
        values = (summary.mean, summary.p50, summary.p90, summary.p95, summary.p99, summary.max)
        table.add_row(title, *(f"{value:,.1f}" for value in values), f"{summary.num_samples:,}")
    return table


def _fact_table(report: "Report") -> Table:
    table = Table(show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value in _facts(report).items():
        if value:
            table.add_row(name, escape(value))
    return table


def _facts(report: "Report") -> dict[str, str]:
    """What there is to say, by name; "" for nothing."""
    requests, throughput, goodput = report.requests, report.throughput, report.goodput
    counts = {
        "completed": requests.completed,
        "failed": requests.failed,
        "unfinished": requests.unfinished,
        "skipped": requests.skipped,
        "not sent": requests.not_sent,
    }
    good = ""
    if goodput is not None:
        limits = (("TTFT", goodput.slo_ttft_ms), ("TPOT", goodput.slo_tpot_ms))
        objectives = " and ".join(f"{name} <= {limit:g} ms" for name, limit in limits if limit is not None)
        good = f"{goodput.requests_per_s:.3f} requests/s, {goodput.share:.1%} of them within {objectives}"
    return {
        "run": f"{report.end}, {report.duration_s:.1f} s, at most {requests.most_at_once} requests at once",
        "requests": ", ".join(f"{count:,} {name}" for name, count in counts.items() if count),
        "throughput": f"{throughput.requests_per_s:.3f} requests/s, {throughput.prompt_tokens_per_s:,.1f} prompt and "
        f"{throughput.output_tokens_per_s:,.1f} output tokens/s",
        "goodput": good,
        "prefix cache": _prefix(report),
        "acceptance": _acceptance(report),
    }


def _prefix(report: "Report") -> str:
    prefix = report.prefix
    parts = []
    if prefix.hit_rate is not None:
        parts.append(f"{prefix.hit_rate:.1%} of the prompt tokens hit (by {prefix.source})")
    if prefix.reusable_share is not None:
        parts.append(f"{prefix.reusable_share:.1%} could at best")
    return ", ".join(parts)


def _acceptance(report: "Report") -> str:
    acceptance = report.acceptance
    parts = []
    if acceptance.rate is not None:
        parts.append(f"{acceptance.rate:.1%} of the drafts (by {acceptance.source})")
    if acceptance.acceptance_length is not None:
        parts.append(f"length {acceptance.acceptance_length:.2f}")
    if acceptance.tokens_per_pass is not None:
        parts.append(f"{acceptance.tokens_per_pass:.2f} tokens a pass")
    if acceptance.rate_per_position:
        parts.append("by position " + " ".join(f"{rate:.2f}" for rate in acceptance.rate_per_position))
    return ", ".join(parts)


def _error_table(report: "Report") -> Table:
    table = Table(title="failed requests", title_justify="left")
    table.add_column("kind", no_wrap=True)
    table.add_column("requests", justify="right", no_wrap=True)
    table.add_column("the first said", overflow="fold")
    for kind, error in report.requests.errors.items():
        table.add_row(kind, f"{error.count:,}", escape(error.example))
    return table


def _category_table(report: "Report") -> Table:
    table = Table(title="by category", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("requests", "output tokens", "mean TPOT (ms)", "acceptance", "tokens a pass"):
        table.add_column(name, justify="right")
    for name, category in report.categories.items():
        table.add_row(
            escape(name),
            f"{category.num_requests:,}",
            f"{category.output_tokens:,}",
            "" if category.mean_tpot_ms is None else f"{category.mean_tpot_ms:,.1f}",
            "" if category.acceptance_rate is None else f"{category.acceptance_rate:.1%}",
            "" if category.tokens_per_pass is None else f"{category.tokens_per_pass:.2f}",
        )
    return table
