"""Checkpoints that the tests of the engine share."""

import pytest

from tests.support.engines import Checkpoints
from tests.support.thread_engine import ThreadEngines


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def thread_engines(checkpoints: Checkpoints) -> ThreadEngines:
    return ThreadEngines(checkpoints)
