"""Draw the figure of transfer.md: `python docs/transfer_figures.py` writes docs/figures/transfer_reshard.svg."""

from dcp_figures import Figure

_LAYER_COLOURS = ("#8ecae6", "#ffd166", "#b7e4c7", "#f4acb7")
_PAGE_IDS = (0, 1, 6, 3, 4, 9, 2, 7)
_NUM_LAYERS, _DCP_SIZE = 8, 4
_WIDTH, _HEIGHT = 30, 20


def draw_reshard() -> None:
    """Layers x pages: cut by rows among prefill ranks, by columns among decode ranks."""
    figure = Figure(760, 330)
    figure.label(20, 24, "prefill: 4 ranks, each some layers of all pages", anchor="start")
    for layer in range(_NUM_LAYERS):
        rank = layer // 2
        if layer % 2 == 0:
            figure.label(20, 58 + _HEIGHT * layer, f"rank {rank}", anchor="start")
        for column in range(len(_PAGE_IDS)):
            figure.box(70 + _WIDTH * column, 36 + _HEIGHT * layer, _WIDTH, _HEIGHT, "", _LAYER_COLOURS[rank])
    for column, page_id in enumerate(_PAGE_IDS):
        figure.label(70 + _WIDTH * (column + 0.5), 208, str(page_id), size=10)
    figure.label(70 + _WIDTH * 4, 226, "pages of the request, with their ids at decode")
    figure.label(410, 24, "decode: 4 ranks, each all layers of the pages it owns", anchor="start")
    for rank in range(_DCP_SIZE):
        owned = [page_id for page_id in _PAGE_IDS if page_id % _DCP_SIZE == rank]
        x = 430 + 80 * rank
        figure.label(x + _WIDTH, 226, f"rank {rank}")
        for column, page_id in enumerate(owned):
            for layer in range(_NUM_LAYERS):
                colour = _LAYER_COLOURS[layer // 2]
                figure.box(x + _WIDTH * column, 36 + _HEIGHT * layer, _WIDTH, _HEIGHT, "", colour)
            figure.label(x + _WIDTH * (column + 0.5), 208, str(page_id), size=10)
    figure.arrow(318, 116, 418, 116)
    for line, text in enumerate(
        (
            "A path is one colour in one decode rank: two layers of the pages with id mod 4 = rank.",
            "Page-major pools keep a column of one colour side by side: one descriptor a page and path.",
            "Paths into one decode rank share one set of page arrays: 16 paths, 4 sets.",
        )
    ):
        figure.label(20, 256 + 24 * line, text, anchor="start")
    figure.write("transfer_reshard.svg")


if __name__ == "__main__":
    draw_reshard()
