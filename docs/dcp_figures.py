"""Draw the figures of dcp.md: `python docs/dcp_figures.py` writes docs/figures/*.svg."""

from html import escape
from pathlib import Path

_FIGURES = Path(__file__).parent / "figures"
_RANK_COLOURS = ("#8ecae6", "#ffd166", "#b7e4c7", "#f4acb7")
_PLAIN, _LINE = "#f1f1f1", "#444444"


class Figure:
    """An SVG that grows by boxes, labels and arrows."""

    def __init__(self, width: int, height: int) -> None:
        self._size = width, height
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, text: str, colour: str = _PLAIN) -> None:
        """Add a box with centred text, a line of it for each line."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}" stroke="{_LINE}"/>'
        )
        lines = text.split("\n")
        for i, line in enumerate(lines):
            self.label(x + width / 2, y + height / 2 + 4 + 15 * (i - (len(lines) - 1) / 2), line)

    def label(self, x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12) -> None:
        """Add one line of text."""
        self._parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Add an arrow."""
        self._parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{_LINE}" marker-end="url(#head)"/>')

    def write(self, name: str) -> None:
        """Write the file."""
        width, height = self._size
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{_LINE}"/></marker>'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif">',
            f'<rect width="{width}" height="{height}" fill="white"/><defs>{head}</defs>',
            *self._parts,
            "</svg>",
        ]
        (_FIGURES / name).write_text("\n".join(lines) + "\n")


def draw_layout() -> None:
    """Page ids of a request, the target pages each rank holds, and the draft pages that all hold."""
    figure = Figure(760, 330)
    page_ids = [0, 1, 6, 3, 4, 9, 2]
    figure.label(20, 28, "request: page ids in order (dcp_size 4)", anchor="start")
    for i, page_id in enumerate(page_ids):
        figure.box(20 + 60 * i, 40, 54, 34, str(page_id), _RANK_COLOURS[page_id % 4])
    figure.label(460, 62, "owner = id mod 4, local page = id div 4", anchor="start")
    for rank in range(4):
        x = 20 + 185 * rank
        figure.box(x, 105, 165, 30, f"rank {rank}", _RANK_COLOURS[rank])
        figure.label(x, 158, "target pool: 3 pages", anchor="start")
        for local_page in range(3):
            page_id = local_page * 4 + rank
            is_held = page_id in page_ids
            figure.box(x + 56 * local_page, 166, 50, 34, str(page_id), _RANK_COLOURS[rank] if is_held else _PLAIN)
        figure.label(x, 228, "draft pool: 12 pages", anchor="start")
        for page_id in range(12):
            column, row = page_id % 6, page_id // 6
            colour = _RANK_COLOURS[page_id % 4] if page_id in page_ids else _PLAIN
            figure.box(x + 28 * column, 236 + 38 * row, 25, 32, str(page_id), colour)
    figure.write("dcp_layout.svg")


def draw_merge() -> None:
    """Two ranks of two heads each: gather queries, attend to owned slots, exchange, merge."""
    figure = Figure(760, 330)
    for rank in range(2):
        y, colour = 40 + 150 * rank, _RANK_COLOURS[rank]
        other = _RANK_COLOURS[1 - rank]
        figure.label(20, y - 8, f"rank {rank}: heads {2 * rank} and {2 * rank + 1}, its own pages", anchor="start")
        figure.box(20, y, 100, 80, "queries of\nown heads", colour)
        figure.box(180, y, 110, 80, "queries of\nall 4 heads")
        figure.box(350, y, 140, 80, "attention to\nowned slots:\n(out, lse) x 4 heads")
        figure.box(550, y, 70, 36, "own", colour)
        figure.box(550, y + 44, 70, 36, "received", other)
        figure.box(670, y, 76, 80, "merge\nown heads", colour)
        for x1, x2 in ((120, 180), (290, 350), (490, 550), (620, 670)):
            figure.arrow(x1, y + 40, x2, y + 40)
    figure.arrow(120, 80, 180, 228)
    figure.arrow(120, 230, 180, 84)
    figure.arrow(490, 80, 550, 250)
    figure.arrow(490, 230, 550, 104)
    figure.label(150, 305, "all-gather of queries")
    figure.label(420, 305, "keys never travel")
    figure.label(590, 305, "all-to-all of (out, lse)")
    figure.write("dcp_merge.svg")


def draw_agreement() -> None:
    """Each rank's own decision, the gather, and the decision all leave with."""
    figure = Figure(760, 300)
    own = ("keeps 3: a b c X", "keeps 2: a b Y", "keeps 3: a b c X", "keeps 3: a b c X")
    for rank, decision in enumerate(own):
        y = 40 + 60 * rank
        figure.box(20, y, 90, 40, f"rank {rank}", _RANK_COLOURS[rank])
        figure.box(130, y, 170, 40, decision, "#ffe5e5" if rank == 1 else _PLAIN)
        figure.arrow(300, y + 20, 380, 150)
        figure.box(620, y, 120, 40, "emits a b c", _RANK_COLOURS[rank])
        figure.arrow(560, 150, 620, y + 20)
    figure.box(380, 100, 180, 100, "all-gather over tp:\ndigest, kept, ids\nkept = min = 2\nids of rank 0, rows 0..2")
    figure.label(215, 28, "own decision")
    figure.label(680, 28, "agreed")
    figure.write("dcp_agreement.svg")


if __name__ == "__main__":
    _FIGURES.mkdir(exist_ok=True)
    draw_layout()
    draw_merge()
    draw_agreement()
