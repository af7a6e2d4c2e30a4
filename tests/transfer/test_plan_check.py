"""A damaged plan is refused, whatever the damage; the error names kind, place and rule."""

from dataclasses import replace

import numpy as np
import pytest

from specdec.kernels.errors import TransferError
from specdec.transfer.pieces import Pieces
from specdec.transfer.placement import by_rank, dcp, layer_split, replicated, token_interleaved
from specdec.transfer.plan_check import check_chunks, check_plan
from specdec.transfer.reshard_plan import EntryPlan, ReshardPlan, Span, plan_reshard
from specdec.transfer.routes import LayerRun, Route, RouteTable
from tests.support.reshard_cases import random_case

ARRAYS = ("source_page_E", "source_row_E", "destination_page_E", "destination_row_E", "first_token_E", "num_tokens_E")


def checked(entry: EntryPlan) -> None:
    check_plan(ReshardPlan({entry.kind: entry}))


def with_arrays(entry: EntryPlan, index_E: np.ndarray, bounds: tuple[int, ...], **changes: np.ndarray) -> EntryPlan:
    arrays = {name: getattr(entry.pieces, name)[index_E] for name in ARRAYS} | changes
    return replace(entry, pieces=Pieces(**arrays, blocks=entry.pieces.blocks), bounds=bounds)


def damaged(entry: EntryPlan, rng: np.random.Generator) -> EntryPlan:
    """Drop, repeat or shift one piece of a plan, or give it to another pair of shards."""
    pieces, bounds = entry.pieces, np.array(entry.bounds)
    i, every = int(rng.integers(len(pieces))), np.arange(len(pieces))
    pair = int(np.searchsorted(bounds, i, side="right")) - 1
    match rng.choice(["drop", "repeat", "pair", *ARRAYS]):
        case "drop":
            bounds[pair + 1 :] -= 1
            return with_arrays(entry, np.delete(every, i), tuple(bounds.tolist()))
        case "repeat":
            bounds[pair + 1 :] += 1
            return with_arrays(entry, np.insert(every, i, i), tuple(bounds.tolist()))
        case "pair" if len(bounds) > 2:
            if pair > 0 and i == bounds[pair]:
                bounds[pair] += 1
            else:  # the pieces of a pair go to its neighbour
                neighbour = pair + 1 if pair + 2 < len(bounds) else pair
                bounds[neighbour] = bounds[neighbour - 1] if neighbour == pair + 1 else bounds[neighbour + 1]
            return with_arrays(entry, every, tuple(bounds.tolist()))
        case name:
            name = "num_tokens_E" if name == "pair" else name
            array = getattr(pieces, name).copy()
            array[i] += int(rng.choice([-1, 1, 2, -100, 10**6]))
            return with_arrays(entry, every, entry.bounds, **{name: array})


@pytest.mark.parametrize("seed", range(4))
def test_any_damaged_piece_is_noticed(seed: int) -> None:
    """A37, A41: pieces of both sides come from one list, token by token."""
    num_damaged = 0
    for number in range(300):
        entry = plan_reshard({"target.latent": random_case(3_000_000 + 1000 * seed + number).span}).entries[
            "target.latent"
        ]
        if not len(entry.pieces):
            continue
        for _ in range(4):
            with pytest.raises(TransferError, match=r"target\.latent"):
                checked(damaged(entry, np.random.default_rng(number)))
            num_damaged += 1
    assert num_damaged > 500


def simple_entry(num_tokens: int = 40) -> EntryPlan:
    span = Span(
        source=layer_split(range(6), num_ranks=2, model_layers=6, page_size=4, num_pages=20),
        destination=dcp(range(6), dcp_size=2, tp_size=4, page_size=4, num_pages=20),
        source_pages=np.arange(10) + 3,
        destination_pages=np.arange(10)[::-1].copy(),
        begin=0,
        end=num_tokens,
    )
    return plan_reshard({"target.latent": span}).entries["target.latent"]


def with_route(entry: EntryPlan, index: int, *routes: Route) -> EntryPlan:
    table = entry.table
    changed = (*table.routes[:index], *routes, *table.routes[index + 1 :])
    return replace(entry, table=RouteTable(table.source, table.destination, changed))


def test_a_missing_or_repeated_route_is_noticed() -> None:
    entry = simple_entry()
    checked(entry)
    with pytest.raises(TransferError, match="destination rank 0 reads layer 0 0 times"):
        checked(with_route(entry, 0))
    with pytest.raises(TransferError, match="destination rank 0 reads layer 0 2 times"):
        checked(with_route(entry, 0, entry.table.routes[0], entry.table.routes[0]))
    table = entry.table
    others = tuple(route for route in table.routes if route.destination_rank != 2)
    with pytest.raises(TransferError, match="no route from source shard 0"):
        checked(replace(entry, table=RouteTable(table.source, table.destination, others)))


def test_layers_are_matched_by_id_and_never_by_position() -> None:
    """A47."""
    span = Span(
        source=by_rank([[2, 5], [0, 7]], page_size=4, num_pages=4),
        destination=replicated([0, 2, 5, 7], page_size=4, num_pages=4),
        source_pages=np.arange(2),
        destination_pages=np.arange(2),
        begin=0,
        end=8,
    )
    entry = plan_reshard({"target.latent": span}).entries["target.latent"]
    runs = {path.source_rank: path.layer_runs for path in entry.paths}
    assert runs == {0: (LayerRun(0, 1, 1, 1, 2),), 1: (LayerRun(0, 1, 0, 3, 2),)}
    checked(entry)
    by_position = replace(entry.table.routes[0], layer_runs=(LayerRun(0, 1, 0, 1, 2),))
    with pytest.raises(TransferError, match=r"layers \(0, 2\) where a route means \(2, 5\): layers are matched by id"):
        checked(with_route(entry, 0, by_position))
    outside = replace(entry.table.routes[0], layer_runs=(LayerRun(0, 1, 3, 1, 2),))
    with pytest.raises(TransferError, match="has 4 layers"):
        checked(with_route(entry, 0, outside))


@pytest.mark.parametrize("side", ["source_pages", "destination_pages"])
def test_a_page_that_stands_for_two_pages_of_a_request_is_refused(side: str) -> None:
    span = simple_entry().span
    tables = {name: getattr(span, name).copy() for name in ("source_pages", "destination_pages")}
    tables[side][7] = tables[side][2]
    entry = plan_reshard({"k": Span(source=span.source, destination=span.destination, begin=0, end=40, **tables)})
    with pytest.raises(TransferError, match="stands for two pages"):
        check_plan(entry)


@pytest.mark.parametrize("page_id", [-1, 40])
def test_padding_and_ids_beyond_the_pool_are_refused(page_id: int) -> None:
    """A15, A5: -1 is nobody's, and ids have an upper bound."""
    span = simple_entry().span
    pages = span.destination_pages.copy()
    pages[3] = page_id
    for destination in (span.destination, dcp(range(6), dcp_size=2, page_size=2, num_pages=20)):
        repeated = np.repeat(pages, 4 // destination.page_size)
        with pytest.raises(TransferError, match=r"pages are 0\.\.19|-1, which is padding"):
            check_plan(
                plan_reshard(
                    {
                        "k": Span(
                            source=span.source,
                            destination=destination,
                            source_pages=span.source_pages,
                            destination_pages=repeated,
                            begin=0,
                            end=40,
                        )
                    }
                )
            )


def test_steps_that_leave_the_shard_are_refused() -> None:
    span = Span(
        source=replicated(range(2), page_size=8, num_pages=8),
        destination=token_interleaved(range(2), width=1, num_shards=2, page_size=8, num_pages=8),
        source_pages=np.arange(5),
        destination_pages=np.tile(np.arange(3), (2, 1)),
        begin=0,
        end=39,
    )
    entry = plan_reshard({"k": span}).entries["k"]
    checked(entry)
    blocks = entry.pieces.blocks
    assert blocks is not None
    for changes in ({"token_step": 3}, {"source_step": 1}, {"destination_step": 2}, {"width": 2}):
        with pytest.raises(TransferError, match="does not follow the tokens of one shard"):
            checked(replace(entry, pieces=replace(entry.pieces, blocks=blocks._replace(**changes))))


def test_chunks_follow_each_other_from_the_prefix_to_the_end() -> None:
    """A40."""
    check_chunks([(7, 12), (12, 12), (12, 30)], begin=7, end=30)
    for chunks, message in (
        ([(7, 12), (13, 30)], "must begin at token 12"),
        ([(7, 12), (11, 30)], "must begin at token 12"),
        ([(0, 30)], "must begin at token 7"),
        ([(7, 29)], "must end with token 29"),
    ):
        with pytest.raises(TransferError, match=message):
            check_chunks(chunks, begin=7, end=30)
