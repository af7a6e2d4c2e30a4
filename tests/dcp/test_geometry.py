"""The geometry value and the context that switches decode context parallelism off."""

import threading

import pytest

from specdec.dcp.geometry import Geometry, PoolRole, active_geometry, dcp_disabled
from specdec.kernels.errors import ConfigError, GeometryError

SHARDED = Geometry(4, 3, PoolRole.TARGET)
WHOLE = Geometry(1, 0, PoolRole.TARGET)


def active_target() -> Geometry:
    return active_geometry(size=4, rank=3, role=PoolRole.TARGET)


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (-1, 0), (1, 1), (4, 4), (4, -1)])
def test_a_rank_outside_its_group_is_refused(size: int, rank: int) -> None:
    with pytest.raises(ConfigError, match="dcp"):
        Geometry(size, rank, PoolRole.TARGET)


def test_geometries_are_equal_only_in_size_rank_and_role() -> None:
    assert Geometry(4, 3, PoolRole.TARGET) == SHARDED
    assert len({SHARDED, WHOLE, Geometry(4, 2, PoolRole.TARGET), Geometry(1, 0, PoolRole.DRAFT)}) == 4


def test_a_draft_over_a_sharded_pool_is_an_error_at_once() -> None:
    with pytest.raises(GeometryError, match="dcp_disabled"):
        active_geometry(size=2, rank=1, role=PoolRole.DRAFT)


def test_everything_built_inside_has_size_one_and_rank_zero() -> None:
    assert active_target() == SHARDED
    with dcp_disabled():
        assert active_target() == WHOLE
        assert active_geometry(size=2, rank=1, role=PoolRole.DRAFT) == Geometry(1, 0, PoolRole.DRAFT)
    assert active_target() == SHARDED


def test_it_nests() -> None:
    with dcp_disabled():
        with dcp_disabled():
            assert active_target() == WHOLE
        assert active_target() == WHOLE
    assert active_target() == SHARDED


def test_it_restores_on_exceptions() -> None:
    with dcp_disabled():
        with pytest.raises(RuntimeError, match="inside"), dcp_disabled():
            raise RuntimeError("inside")
        assert active_target() == WHOLE
    with pytest.raises(RuntimeError, match="inside"), dcp_disabled():
        raise RuntimeError("inside")
    assert active_target() == SHARDED


def test_threads_started_inside_do_not_inherit_it() -> None:
    seen = []
    with dcp_disabled():
        thread = threading.Thread(target=lambda: seen.append(active_target()))
        thread.start()
        thread.join()
    assert seen == [SHARDED]


def test_a_thread_that_switches_it_off_does_not_switch_off_others() -> None:
    entered, leave = threading.Event(), threading.Event()

    def stay_inside() -> None:
        with dcp_disabled():
            entered.set()
            leave.wait(timeout=60)

    thread = threading.Thread(target=stay_inside)
    thread.start()
    entered.wait(timeout=60)
    assert active_target() == SHARDED
    leave.set()
    thread.join()
