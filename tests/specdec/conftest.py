"""Checkpoints that the tests of the engine share."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.engines import Checkpoints
from tests.support.first_difference import tally
from tests.support.thread_engine import ThreadEngines


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def thread_engines(checkpoints: Checkpoints) -> ThreadEngines:
    return ThreadEngines(checkpoints)


@pytest.fixture(autouse=True)
def _record_comparisons(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Report what this test compared; `tests/conftest.py` adds it up."""
    tally.clear()
    yield
    for name, count in tally.items():
        record_property(name, count)
