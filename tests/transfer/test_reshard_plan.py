"""What plans are made of: sharing, load over replicas, page tables that do not fit, digests."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec.kernels.errors import TransferError
from specdec.transfer.placement import Placement, by_rank, dcp, layer_split, on_one_rank, replicated, token_interleaved
from specdec.transfer.plan_check import check_plan
from specdec.transfer.reshard_plan import ReshardPlan, Span, plan_reshard

SIZES = {"page_size": 4, "num_pages": 64}


def span_of(source: Placement, destination: Placement, **changes: Any) -> Span:
    num_tokens = 30

    def pages(side: Placement) -> np.ndarray:
        if side.block_width is None:
            return np.arange(8)
        return np.tile(np.arange(8), (side.num_shards, 1))

    fields = {"source_pages": pages(source), "destination_pages": pages(destination), "begin": 0, "end": num_tokens}
    return Span(source=source, destination=destination, **(fields | changes))


def read_tokens(plan: ReshardPlan) -> dict[int, int]:
    """Tokens x layers that each source rank sends."""
    load: dict[int, int] = {}
    for path in plan.paths:
        load[path.source_rank] = load.get(path.source_rank, 0) + path.num_tokens * len(path.route.layers)
    return load


def test_kinds_with_the_same_pages_and_paths_between_the_same_shards_share_their_arrays() -> None:
    span = span_of(layer_split(range(8), num_ranks=4, model_layers=8, **SIZES), dcp(range(8), dcp_size=2, **SIZES))
    index_keys = span_of(
        layer_split([0, 5], num_ranks=4, model_layers=8, **SIZES),
        dcp([0, 5], dcp_size=2, **SIZES),
        source_pages=span.source_pages,
        destination_pages=span.destination_pages,
    )
    plan = plan_reshard({"target.latent": span, "target.index_keys": index_keys})
    assert plan.entries["target.latent"].pieces is plan.entries["target.index_keys"].pieces
    paths = [path for path in plan.entries["target.latent"].paths if path.destination_rank == 1]
    assert len(paths) == 4
    assert len({id(path.pieces) for path in paths}) == 1
    assert paths[0].pieces.source_page_E.base is plan.entries["target.latent"].pieces.source_page_E


def test_a_layer_split_names_contiguous_layers_and_a_draft_comes_from_the_last_rank() -> None:
    """A31: the draft has placements of its own."""
    target = span_of(layer_split(range(78), num_ranks=8, model_layers=78, **SIZES), dcp(range(78), dcp_size=4, **SIZES))
    draft = span_of(on_one_rank([0], rank=7, num_ranks=8, **SIZES), replicated([0], num_ranks=4, **SIZES), end=29)
    plan = plan_reshard({"target.latent": target, "draft.latent": draft})
    check_plan(plan)
    assert [len(path.route.layers) for path in plan.entries["target.latent"].paths[:8]] == [10] * 6 + [9] * 2
    assert [
        (path.source_rank, path.destination_rank, path.num_tokens) for path in plan.entries["draft.latent"].paths
    ] == [(7, rank, 29) for rank in range(4)]
    assert [path.kind for path in plan.paths_from(7)] == ["target.latent"] * 4 + ["draft.latent"] * 4
    assert len(plan.paths_from(0)) == 4


@pytest.mark.parametrize(
    ("num_replicas", "tp_size", "dcp_size"), [(1, 4, 4), (2, 8, 4), (4, 4, 2), (4, 2, 1), (8, 1, 1)]
)
def test_replicas_share_the_load_and_nobody_reads_a_cell_twice(num_replicas: int, tp_size: int, dcp_size: int) -> None:
    source = replicated(range(8), num_ranks=num_replicas, **SIZES)
    span = span_of(source, dcp(range(8), dcp_size=dcp_size, tp_size=tp_size, **SIZES), end=32)
    plan = plan_reshard({"target.latent": span})
    check_plan(plan)
    load = read_tokens(plan)
    assert sum(load.values()) == 32 * 8 * tp_size // dcp_size
    assert len(load) == num_replicas
    assert len(set(load.values())) == 1


def test_two_groups_of_sources_share_the_load() -> None:
    """A48: more source ranks do not multiply what is sent."""
    source = dcp(range(8), dcp_size=2, tp_size=4, **SIZES)
    plan = plan_reshard({"target.latent": span_of(source, dcp(range(8), dcp_size=4, **SIZES), end=32)})
    check_plan(plan)
    assert read_tokens(plan) == {0: 64, 1: 64, 2: 64, 3: 64}


def test_a_destination_rank_without_tokens_has_a_path_to_complete() -> None:
    """A45."""
    source = layer_split(range(4), num_ranks=2, model_layers=4, **SIZES)
    plan = plan_reshard({"target.latent": span_of(source, dcp(range(4), dcp_size=4, **SIZES), end=3)})
    check_plan(plan)
    assert [(path.destination_rank, path.num_tokens) for path in plan.paths] == [
        (rank, 3 if rank == 0 else 0) for rank in range(4) for _ in range(2)
    ]


def test_an_empty_span_has_paths_and_no_pieces() -> None:
    plan = plan_reshard({"k": span_of(replicated([0], **SIZES), dcp([0], dcp_size=2, **SIZES), begin=9, end=9)})
    check_plan(plan)
    assert [len(path.pieces) for path in plan.paths] == [0, 0]


def test_only_the_last_page_is_a_part_and_only_live_rows_are_named() -> None:
    """A41."""
    plan = plan_reshard({"k": span_of(replicated([0], **SIZES), replicated([0], **SIZES), begin=6, end=15)})
    (path,) = plan.paths
    assert path.pieces.first_token_E.tolist() == [6, 8, 12]
    assert path.pieces.source_row_E.tolist() == path.pieces.destination_row_E.tolist() == [2, 0, 0]
    assert path.pieces.num_tokens_E.tolist() == [2, 4, 3]


def test_interleaved_tokens_of_a_page_are_one_piece() -> None:
    destination = token_interleaved([0], width=1, num_shards=2, page_size=4, num_pages=64)
    plan = plan_reshard({"k": span_of(replicated([0], **SIZES), destination, end=16)})
    pieces = plan.paths[1].pieces
    assert pieces.blocks == (1, 2, 2, 1)
    assert pieces.first_token_E.tolist() == [1, 5, 9, 13]
    assert pieces.num_tokens_E.tolist() == [2, 2, 2, 2]
    assert pieces.destination_row_E.tolist() == [0, 2, 0, 2]
    assert pieces.runs().first_token_E.tolist() == [1, 3, 5, 7, 9, 11, 13, 15]


def test_a_layer_that_no_source_holds_is_refused() -> None:
    with pytest.raises(TransferError, match="wants layer 2, which no source rank of shard 0 holds"):
        plan_reshard({"k": span_of(by_rank([[0], [1]], **SIZES), replicated([0, 1, 2], **SIZES))})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"begin": 5, "end": 4}, "0 <= begin <= end"),
        ({"begin": -1}, "0 <= begin <= end"),
        ({"end": 33}, "33 tokens take 9 source page ids"),
        ({"source_pages": np.arange(8, dtype=np.int32)}, "source pages must be int64"),
        ({"destination_pages": np.arange(8)}, r"on each of 2 shards \[N, P\]"),
        ({"destination_pages": np.zeros((2, 3), np.int64)}, "take 4 destination pages"),
    ],
)
def test_pages_that_do_not_fit_the_span_are_refused(changes: dict[str, Any], message: str) -> None:
    destination = token_interleaved([0], width=1, num_shards=2, page_size=4, num_pages=64)
    with pytest.raises(TransferError, match=message):
        plan_reshard({"k": span_of(replicated([0], **SIZES), destination, **changes)})


def test_the_digest_is_equal_for_equal_spans_and_differs_where_anything_differs() -> None:
    source, destination = (
        layer_split(range(8), num_ranks=4, model_layers=8, **SIZES),
        dcp(range(8), dcp_size=2, **SIZES),
    )
    plan = plan_reshard({"k": span_of(source, destination)})
    assert plan.digest == plan_reshard({"k": span_of(replace(source), replace(destination))}).digest
    other_pages = np.arange(8)
    other_pages[[2, 4]] = [4, 2]
    others = [
        {"k": span_of(source, destination, begin=1)},
        {"k": span_of(source, destination, end=29)},
        {"k": span_of(source, destination, source_pages=other_pages)},
        {"k": span_of(source, destination, destination_pages=other_pages)},
        {"k": span_of(destination, source)},
        {"k": span_of(replicated(range(8), **SIZES), destination)},
        {"k": span_of(source, dcp(range(8), dcp_size=2, tp_size=4, **SIZES))},
        {"k": span_of(source, dcp(range(8), dcp_size=4, **SIZES))},
        {"l": span_of(source, destination)},
        {"k": span_of(source, destination), "l": span_of(source, destination)},
    ]
    digests = {plan_reshard(spans).digest for spans in others} | {plan.digest}
    assert len(digests) == len(others) + 1


def test_pages_outside_of_the_span_do_not_matter() -> None:
    """A46: both sides cut the same prefix, so a plan names and reads the suffix only."""
    source, destination = replicated(range(2), **SIZES), dcp(range(2), dcp_size=2, **SIZES)
    unknown = np.arange(8)
    unknown[:3] = -1
    spans = [span_of(source, destination, begin=12, source_pages=pages) for pages in (np.arange(8), unknown)]
    plans = [plan_reshard({"k": span}) for span in spans]
    check_plan(plans[1])
    assert plans[0].digest == plans[1].digest
    assert plans[1].entries["k"].pieces.first_token_E.min() == 12


@pytest.mark.parametrize("module", ["reshard_plan", "plan_check", "descriptors"])
def test_plans_are_made_without_torch(module: str) -> None:
    """Whoever moves its own KV needs numpy and nothing of an engine."""
    script = f"import sys, specdec.transfer.{module}; print(sorted({{'torch', 'triton'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
