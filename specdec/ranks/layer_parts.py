"""What of a path can go before the others: its layers, a few at a time, in the order in which a pass stores them.

A page-major pool keeps the layers of a page side by side, so a part of the layers is one descriptor a page, as all of
them are. Many parts let the first go early and leave little behind the last layer; few keep descriptors long.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from specdec.dcp.layer_split import split_layers
from specdec.dcp.layout import EntryLayout
from specdec.transfer.reshard_plan import Path
from specdec.transfer.routes import Route

# Of a page in a part, at least: pieces of 420 KB cost a tenth of the speed of one block (docs/transports.md).
PART_BYTES = 256 << 10


def parts_by_layer(paths: Sequence[Path], entries: Mapping[str, EntryLayout]) -> Iterator[tuple[int, Path]]:
    """Cut paths, and say which layer each part waits for: all of its own are stored by then.

    The parts of the kind with the most bytes a layer end at the layers that are waited for. What is small beside them
    goes with the next of these, for a write of its own would be short.

    Args:
        paths: Of one source rank.
        entries: Layouts by name of the kind of entry.
    """
    sizes = {path.kind: entries[path.kind].bytes_per_layer_page for path in paths}
    parts = [part for path in paths for part in layer_parts(path, bytes_per_layer_page=sizes[path.kind])]
    most = max(sizes.values(), default=0)
    ends = sorted({part.route.layers[-1] for part in parts if sizes[part.kind] == most})
    for part in parts:
        last = part.route.layers[-1]
        yield next((end for end in ends if end >= last), last), part


def layer_parts(path: Path, *, bytes_per_layer_page: int) -> Iterator[Path]:
    """Cut a path into as many runs of neighbouring layers as have `PART_BYTES` of a page each; one where none has.

    Args:
        path: Any.
        bytes_per_layer_page: Of its kind of entry.
    """
    num_layers = len(path.route.layers)
    fewest_layers = -(-PART_BYTES // bytes_per_layer_page)
    for places in split_layers(num_layers, max(1, num_layers // fewest_layers)):
        yield replace(path, route=_of_layers(path.route, places))


def _of_layers(route: Route, places: range) -> Route:
    """Give a route of some neighbours among the layers of one."""
    runs, first = [], 0
    for run in route.layer_runs:
        begin, end = max(places.start - first, 0), min(places.stop - first, run.num_layers)
        if begin < end:
            runs.append(
                run._replace(
                    source_base=run.source_base + begin * run.source_stride,
                    destination_base=run.destination_base + begin * run.destination_stride,
                    num_layers=end - begin,
                )
            )
        first += run.num_layers
    return replace(route, layers=route.layers[places.start : places.stop], layer_runs=tuple(runs))
