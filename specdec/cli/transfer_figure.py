"""The matrix of a transfer plan as an SVG."""

from html import escape

from specdec.cli.transfer_report import EntryReport, TransferReport
from specdec.memory.rank_memory import size_text

_CELL_WIDTH, _CELL_HEIGHT, _LEFT, _LINE = 96, 40, 150, 18


def draw_report(model: str, report: TransferReport) -> str:
    """Draw one matrix for each kind of entry: source ranks down, destination ranks across, darker where more moves."""
    settings = report.settings
    width = _LEFT + _CELL_WIDTH * max(entry.bytes_SD.shape[1] for entry in report.entries) + 20
    parts = [
        _text(
            10,
            24,
            f"{model}: {settings.source} to tp {settings.tp_size}, dcp {settings.dcp_size}, tokens {settings.prefix} "
            f"to {settings.tokens - 1}, {settings.kv_format.value}, {settings.layout}",
        )
    ]
    y = 52
    for entry in report.entries:
        parts += _matrix(entry, y)
        y += 2 * _LINE + _CELL_HEIGHT * entry.bytes_SD.shape[0] + 24
    parts.append(_text(10, y, f"hidden state: {size_text(report.hidden_state_bytes)}, once, with the last message"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 20}" width="{width}" '
            f'height="{y + 20}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{y + 20}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _matrix(entry: EntryReport, y: int) -> list[str]:
    num_sources, num_destinations = entry.bytes_SD.shape
    parts = [
        _text(
            10, y, f"{entry.kind}: {size_text(entry.total_bytes)} in {entry.num_paths} paths, {entry.share:.0%} of all"
        ),
        *(_text(_LEFT + _CELL_WIDTH * d + 6, y + _LINE, f"to rank {d}") for d in range(num_destinations)),
    ]
    largest = max(int(entry.bytes_SD.max()), 1)
    for source in range(num_sources):
        top = y + _LINE + 6 + _CELL_HEIGHT * source
        parts.append(_text(10, top + 24, f"rank {source}, {int(entry.layers_SD[source].max())} layers"))
        for destination in range(num_destinations):
            size = int(entry.bytes_SD[source, destination])
            left = _LEFT + _CELL_WIDTH * destination
            parts.append(
                f'<rect x="{left}" y="{top}" width="{_CELL_WIDTH - 4}" height="{_CELL_HEIGHT - 4}" rx="4" '
                f'fill="#8ecae6" fill-opacity="{size / largest:.3f}" stroke="#444444"/>'
            )
            if size:
                parts.append(_text(left + 6, top + 15, size_text(size)))
                parts.append(_text(left + 6, top + 30, f"{int(entry.descriptors_SD[source, destination]):,} desc."))
    return parts


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'
