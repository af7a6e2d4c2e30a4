"""The servers that the tests share: one that serves glm-tiny, and as many without a model as they like."""

from collections.abc import Iterator
from functools import partial

import pytest

from specdec.engine import Engine
from specdec.serving.engine_gauges import read_gauges
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import RunningServer, running_server


@pytest.fixture(scope="session")
def glm_tiny() -> Iterator[Engine]:
    with Engine.from_pretrained("glm-tiny", max_num_requests=8, num_draft_tokens=3) as engine:
        yield engine


@pytest.fixture(scope="session")
def tiny_server(glm_tiny: Engine) -> Iterator[RunningServer]:
    with running_server(
        glm_tiny, read_gauges=partial(read_gauges, glm_tiny), model_names=("glm-tiny", "alias"), max_running=8
    ) as running:
        yield running


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[RunningServer]:
    with running_server(engine) as running:
        yield running
