"""Everything a rank loads and computes happens while its own device is the current one of the thread that does it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specdec import Engine, SamplingParams
from specdec.models.glm.target import GlmTarget
from specdec.ranks import rank_setup, worker


def test_a_rank_builds_and_runs_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = threading.local()
    seen: list[object] = []

    @contextmanager
    def as_current(device: torch.device) -> Iterator[None]:
        before, current.device = getattr(current, "device", None), device
        yield
        current.device = before

    for module in (rank_setup, worker):
        monkeypatch.setattr(module, "as_current", as_current)
    for name in ("__init__", "forward", "logits"):
        method = getattr(GlmTarget, name)

        def watched(*args, method=method, **kwargs):
            seen.append(getattr(current, "device", None))
            return method(*args, **kwargs)

        monkeypatch.setattr(GlmTarget, name, watched)
    with Engine.from_pretrained("glm-tiny", num_draft_tokens=2) as engine:
        thread = threading.Thread(target=engine.generate, args=([1, 2, 3], SamplingParams(max_tokens=3)))
        thread.start()
        thread.join()
    assert len(seen) > 3
    assert set(seen) == {torch.device("cpu")}
