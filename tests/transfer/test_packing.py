"""Packed paths leave the bytes that unpacked ones leave, from a buffer of any size."""

import numpy as np
import pytest
import torch

from specdec.dcp.geometry import PoolRole
from specdec.dcp.layout import FieldLayout, KvFormat, PoolLayout
from specdec.kernels.errors import TransferError
from specdec.transfer.descriptors import RegionMemory, expand_path
from specdec.transfer.packing import PackBuffer, pack_path, packing_pays, paths_by_pack, region_bytes_of_chunk
from specdec.transfer.placement import dcp, layer_split, replicated, token_interleaved
from specdec.transfer.reshard_plan import Path, ReshardPlan, Span, plan_reshard
from tests.support.reshard_cases import ReshardCase, moved_by_definition, random_case

LATENT = PoolLayout(
    role=PoolRole.TARGET,
    page_size=64,
    kv_format=KvFormat.FP8_PACKED,
    kv_lora_rank=512,
    rope_head_dim=64,
    index_head_dim=128,
    num_latent_layers=10,
    index_layers=(0, 1, 2, 6),
).latent


def move_packed(case: ReshardCase, capacity_bytes: int) -> list[np.ndarray]:
    """Gather every slice of every pack into a buffer of noise, and send it to each of its readers."""
    memory = [rank.copy() for rank in case.destination_memory]
    source_memory = [torch.from_numpy(rank) for rank in case.source_memory]
    for paths in paths_by_pack(plan_reshard({"entry": case.span}).paths):
        first = paths[0]
        regions = case.source_regions[first.source_rank], case.destination_regions[first.destination_rank]
        for part in pack_path(first, *regions, capacity_bytes=capacity_bytes):
            buffer = torch.randint(0, 256, (capacity_bytes,), dtype=torch.uint8)
            part.gather(source_memory[first.source_rank], buffer)
            sent = part.descriptors
            for at, to, size in zip(sent.source_offset_X, sent.destination_offset_X, sent.length_X, strict=True):
                for path in paths:
                    memory[path.destination_rank][to : to + size] = buffer.numpy()[at : at + size]
    return memory


@pytest.mark.parametrize("seed", range(4))
def test_packed_paths_leave_the_same_bytes_whatever_the_buffer_holds_at_once(seed: int) -> None:
    for number in range(150):
        case = random_case(2_000_000 + 1000 * seed + number)
        for capacity_bytes in (40, 100_000):  # a few rows, and everything
            if number % 3 and capacity_bytes == 40:
                continue
            for memory, right in zip(move_packed(case, capacity_bytes), moved_by_definition(case), strict=True):
                np.testing.assert_array_equal(memory, right)


def interleaved_plan(num_tokens: int, *, tp_size: int = 4) -> ReshardPlan:
    num_pages = -(-num_tokens // 64)
    span = Span(
        source=replicated(range(10), page_size=64, num_pages=num_pages),
        destination=token_interleaved(
            range(10), width=1, num_shards=4, tp_size=tp_size, page_size=64, num_pages=num_pages
        ),
        source_pages=np.arange(num_pages),
        destination_pages=np.tile(np.arange(-(-num_pages // 4)), (4, 1)),
        begin=0,
        end=num_tokens,
    )
    return plan_reshard({"target.latent": span})


def page_major() -> RegionMemory:
    return RegionMemory.page_major(LATENT, num_layers=10)


def test_interleaved_tokens_take_a_descriptor_each_unpacked_and_one_for_a_run_of_pages_packed() -> None:
    path = interleaved_plan(4096).paths[1]
    assert len(expand_path(path, page_major(), page_major())) == 1024 * 10
    (part,) = pack_path(path, page_major(), page_major(), capacity_bytes=1024 * 10 * 656)
    assert len(part.descriptors) == 1
    assert part.descriptors.num_bytes == 1024 * 10 * 656


def test_a_chunk_larger_than_the_buffer_is_sliced_and_never_sent_row_by_row() -> None:
    """A42, B59."""
    path = interleaved_plan(4096).paths[0]
    capacity_bytes = 1024 * 1024
    parts = list(pack_path(path, page_major(), page_major(), capacity_bytes=capacity_bytes))
    assert len(parts) == -(-1024 * 10 * 656 // (capacity_bytes // 656 * 656))
    assert sum(part.descriptors.num_bytes for part in parts) == 1024 * 10 * 656
    assert max(len(part.descriptors) for part in parts) == 1
    assert all(
        int((part.descriptors.source_offset_X + part.descriptors.length_X).max()) <= capacity_bytes for part in parts
    )


def test_peers_of_one_shard_share_a_pack() -> None:
    groups = paths_by_pack(interleaved_plan(1000, tp_size=8).paths)
    assert [[path.destination_rank for path in group] for group in groups] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_path_without_tokens_has_no_slice_and_is_still_a_path() -> None:
    """A45."""
    empty = [path for path in interleaved_plan(2).paths if not len(path.pieces)]
    assert [path.destination_rank for path in empty] == [2, 3]
    for path in empty:
        assert list(pack_path(path, page_major(), page_major(), capacity_bytes=656)) == []
        assert len(expand_path(path, page_major(), page_major())) == 0


def test_fields_that_stand_side_by_side_at_the_destination_are_sent_together() -> None:
    fields = (FieldLayout("keys", 0, 132, 128), FieldLayout("scales", 128, 132, 4))
    by_token = RegionMemory(page_size=64, page_stride=640 * 132, layer_stride=64 * 132, fields=fields)
    fields = (FieldLayout("keys", 0, 128, 128), FieldLayout("scales", 64 * 128, 4, 4))
    by_page = RegionMemory(page_size=64, page_stride=640 * 132, layer_stride=64 * 132, fields=fields)
    path = interleaved_plan(256).paths[0]
    assert len(expand_path(path, by_page, by_token)) == 64 * 10 * 2
    (part,) = pack_path(path, by_page, by_token, capacity_bytes=1 << 20)
    assert len(part.descriptors) == 1


def page_level_path() -> Path:
    span = Span(
        source=layer_split(range(10), num_ranks=2, model_layers=10, page_size=64, num_pages=9),
        destination=dcp(range(10), dcp_size=2, page_size=64, num_pages=9),
        source_pages=np.arange(9),
        destination_pages=np.arange(9),
        begin=0,
        end=9 * 64,
    )
    return plan_reshard({"target.latent": span}).paths[0]


def test_packing_pays_for_interleaved_tokens_and_not_for_pages() -> None:
    assert packing_pays(interleaved_plan(640).paths[0], page_major(), page_major(), capacity_bytes=1 << 24)
    source = RegionMemory.page_major(LATENT, num_layers=5)
    assert not packing_pays(page_level_path(), source, page_major(), capacity_bytes=1 << 24)


def test_a_region_sized_from_the_chunk_takes_it_in_one_slice() -> None:
    path = interleaved_plan(1001).paths[0]
    capacity_bytes = region_bytes_of_chunk(path.num_tokens, 10, page_major())
    assert len(list(pack_path(path, page_major(), page_major(), capacity_bytes=capacity_bytes))) == 1


def test_a_region_smaller_than_a_row_is_refused() -> None:
    with pytest.raises(TransferError, match="must hold a row of 656"):
        next(pack_path(interleaved_plan(8).paths[0], page_major(), page_major(), capacity_bytes=655))


def test_regions_of_a_buffer_do_not_overlap() -> None:
    buffer = PackBuffer(torch.zeros(99, dtype=torch.uint8), num_regions=3)
    for region in range(3):
        buffer.view(region).add_(1)
    assert int(buffer.memory.max()) == 1
    assert [buffer.offset(region) for region in range(3)] == [0, 32, 64]
