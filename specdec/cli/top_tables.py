"""Servers as tables: one in full, several in a row each."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from specdec.top.activity import Activity, Percentiles, Window
    from specdec.top.sample import Pages, PrefillStatus, ServerSample

_STYLES = {"ready": "green", "not ready": "yellow", "unhealthy": "red", "gone": "red"}
_BAR_WIDTH = 60
_UNKNOWN = "-"


def server_tables(samples: Sequence["ServerSample"]) -> RenderableType:
    """Give the view of some servers for a terminal."""
    return _one_server(samples[0]) if len(samples) == 1 else _many_servers(samples)


def _one_server(sample: "ServerSample") -> Group:
    parts: list[RenderableType] = [_heading(sample)]
    if sample.num_running is not None and sample.num_waiting is not None:
        parts.append(f"choices    {sample.num_running:,} running, {sample.num_waiting:,} waiting")
    if sample.num_groups is not None and sample.num_transfers is not None:
        parts.append(f"hand-off   {sample.num_groups:,} decode groups, {sample.num_transfers:,} transfers running")
    parts += map(_prefill, sample.prefills)
    if sample.pages is not None:
        parts += [_page_counts(sample.pages), _page_bar(sample.pages)]
    if sample.since_start is not None:
        parts.append(_activity_table(sample.window, sample.since_start))
    return Group(*parts)


def _heading(sample: "ServerSample") -> Text:
    text = Text()
    text.append(_printable(sample.url), style="bold")
    text.append(f"  {_printable(sample.model)}" if sample.model else "")
    text.append("  ").append_text(_state(sample))
    if sample.num_restarts:
        text.append(f"  started again {sample.num_restarts} times", style="yellow")
    return text


def _state(sample: "ServerSample") -> Text:
    detail = f": {_printable(sample.detail)}" if sample.detail else ""
    return Text(f"{sample.state.value}{detail}", style=_STYLES[sample.state])


def _prefill(prefill: "PrefillStatus") -> Text:
    text = Text(f"prefill    {_printable(prefill.address)}  ")
    text.append(_printable(prefill.state), style="green" if prefill.state == "ready" else "yellow")
    return text.append(f"  {_count(prefill.queued_tokens)} tokens queued")


def _page_counts(pages: "Pages") -> str:
    counts = f"{pages.used:,} used, {pages.cached:,} cached, {pages.free:,} free"
    return f"KV pages   {counts}, {pages.quarantined:,} quarantined"


def _page_bar(pages: "Pages") -> Text:
    """Draw used, cached and free pages; whoever holds pages has one block at least."""
    num_used = -(-_BAR_WIDTH * pages.used // max(pages.total, 1))
    num_held = max(num_used, -(-_BAR_WIDTH * (pages.used + pages.cached) // max(pages.total, 1)))
    bar = Text("           ")
    bar.append("█" * num_used, style="cyan")
    bar.append("▒" * (num_held - num_used), style="cyan")
    return bar.append("░" * (_BAR_WIDTH - num_held), style="dim")


def _activity_table(window: "Window | None", since_start: "Activity") -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("" if window is None else f"last {window.duration_s:.0f} s", justify="right")
    table.add_column("since start", justify="right")
    for title, recent, since in _activity_rows(window, since_start):
        table.add_row(title, recent, since)
    return table


def _activity_rows(window: "Window | None", since_start: "Activity") -> Iterator[tuple[str, str, str]]:
    """Titles, what holds for the window, and what holds since the start."""

    def both(title: str, show: "Callable[[Activity], str]") -> tuple[str, str, str]:
        return title, _UNKNOWN if window is None else show(window.activity), show(since_start)

    rates: tuple[float | None, ...] = (None, None, None)
    if window is not None:
        rates = (window.ended_per_s, window.prompt_tokens_per_s, window.output_tokens_per_s)
    totals = (sum(since_start.ended.values()), since_start.prompt_tokens, since_start.output_tokens)
    for title, rate, total in zip(("choices ended", "prompt tokens", "output tokens"), rates, totals, strict=True):
        yield title, _rate(rate, unit="/s"), _count(total)
    yield both("ended by reason", lambda activity: _by_name(activity.ended))
    yield both("TTFT p50 p90 p99, ms", lambda activity: _percentiles(activity.ttft_ms))
    yield both("ITL p50 p90 p99, ms", lambda activity: _percentiles(activity.itl_ms))
    yield both("queue p50 p90 p99, ms", lambda activity: _percentiles(activity.queue_ms))
    yield both("acceptance length", lambda activity: _length(activity.acceptance_length))
    yield both("acceptance per position", lambda activity: _positions(activity.acceptance_by_position))
    yield both("prefix hit rate", lambda activity: _share(activity.prefix_hit_rate))
    yield both("preemptions", lambda activity: _count(activity.num_preemptions))
    if since_start.prefill_prompts:
        yield both("prompts of prefills", lambda activity: _by_name(activity.prefill_prompts))
    if since_start.transfers:
        yield both("transfers", lambda activity: _by_name(activity.transfers))
        rate = None if window is None else window.transfer_bytes_per_s
        yield "bytes sent", _size(rate, unit="/s"), _size(since_start.transfer_bytes)


def _many_servers(samples: Sequence["ServerSample"]) -> Group:
    durations = [sample.window.duration_s for sample in samples if sample.window is not None]
    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("server", overflow="fold", min_width=14)
    has_transfers = any(sample.num_groups is not None for sample in samples)
    titles = ("run\nwait", "in/s", "out/s", "TTFT\np50 p99", "ITL\np50 p99", "acc", "hit", "pages")
    for title in (*titles, "sent/s") if has_transfers else titles:
        table.add_column(title, justify="right", no_wrap=True)
    for sample in samples:
        table.add_row(Text(_place(sample), style=_STYLES[sample.state]), *_cells(sample, has_transfers=has_transfers))
    if durations:
        table.caption = f"rates, latencies in ms and shares of the last {max(durations):.0f} s"
    notes = [
        Text.assemble(_place(sample), "  ", _state(sample))
        for sample in samples
        if sample.state != "ready" or sample.detail
    ]
    return Group(table, *notes)


def _place(sample: "ServerSample") -> str:
    return _printable(sample.url).partition("://")[2]


def _cells(sample: "ServerSample", *, has_transfers: bool) -> Iterator[str]:
    window, pages = sample.window, sample.pages
    yield f"{_count(sample.num_running)} {_count(sample.num_waiting)}"
    if window is None:
        yield from [_UNKNOWN] * 6
    else:
        activity = window.activity
        yield _rate(window.prompt_tokens_per_s)
        yield _rate(window.output_tokens_per_s)
        yield _outer_percentiles(activity.ttft_ms)
        yield _outer_percentiles(activity.itl_ms)
        yield _length(activity.acceptance_length)
        yield _UNKNOWN if activity.prefix_hit_rate is None else f"{activity.prefix_hit_rate:.0%}"
    yield _UNKNOWN if pages is None else f"{pages.used / max(pages.total, 1):.0%}"
    if has_transfers:
        yield _size(None if window is None else window.transfer_bytes_per_s)


def _count(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"


def _rate(value: float | None, *, unit: str = "") -> str:
    return _UNKNOWN if value is None else f"{_short(value)}{unit}"


def _size(value: float | None, *, unit: str = "") -> str:
    return _UNKNOWN if value is None else decimal(int(value)) + unit


def _length(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.1%}"


def _positions(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or _UNKNOWN


def _percentiles(value: "Percentiles | None") -> str:
    return _UNKNOWN if value is None else f"{_short(value.p50)} {_short(value.p90)} {_short(value.p99)}"


def _outer_percentiles(value: "Percentiles | None") -> str:
    return _UNKNOWN if value is None else f"{_short(value.p50)} {_short(value.p99)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _by_name(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {_printable(name)}" for name, count in counts.items() if count) or _UNKNOWN


def _printable(text: str) -> str:
    """Replace what would steer the terminal: a server may send anything."""
    return "".join(character if character.isprintable() else "?" for character in text)
