"""Runs are kept up to the first draft that the target does not draw, and requests move on by what was emitted."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.commit_runs import CommittedRuns, RunState, commit_runs, commit_runs_ref
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

CASES = """
from dataclasses import fields

import torch
from specdec.kernels.commit_runs import CommittedRuns, RunState, commit_runs, commit_runs_ref

def check(device):
    generator = torch.Generator(device).manual_seed(0)
    def integers(low, high, *shape):
        return torch.randint(low, high, shape, device=device, generator=generator)

    for requests, rows in ((1, 1), (40, 1), (64, 2), (300, 6), (50, 9)):
        num_rows = integers(0, rows + 1, requests)
        length = integers(1, 50, requests)
        state = RunState(
            length_B=length,
            limit_B=length + num_rows + integers(0, 2 * rows, requests),  # drafts always have room
            num_rows_B=num_rows,
            token_BQ=integers(0, 2, requests, rows),
        )
        drawn, is_drawn = integers(0, 2, requests * rows), integers(0, 20, requests * rows) > 0
        expected = commit_runs_ref(drawn, is_drawn, state)
        out = CommittedRuns.empty(requests, rows, device=torch.device(device))
        commit_runs(drawn, is_drawn, state, out=out)
        for ours, theirs in zip((state, out), expected):
            for field in fields(ours):
                assert torch.equal(getattr(ours, field.name), getattr(theirs, field.name)), (requests, rows, field.name)
"""


def test_the_definition_keeps_equal_drafts_and_counts_what_is_left() -> None:
    # Two drafts of the first are kept; none of the second, whose row has nothing to draw; all of the third. The fourth
    # is idle. The fifth has one row, at its end. Of the last, the row behind the second draft has nothing to draw.
    token_BQ = torch.tensor([[1, 5, 6, 7], [2, 5, 6, 7], [3, 5, 6, 7], [9, 5, 6, 7], [4, 5, 6, 7], [8, 5, 1, 1]])
    drawn_T = torch.tensor([[5, 6, 8, 8], [4, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 1, 1, 1]])
    is_drawn_T = torch.ones(6, 4, dtype=torch.bool)
    is_drawn_T[1, 0] = is_drawn_T[3, 0] = is_drawn_T[5, 2] = False
    state = RunState(
        length_B=torch.tensor([10, 20, 30, 40, 50, 60]),
        limit_B=torch.tensor([100, 23, 34, 100, 51, 100]),
        num_rows_B=torch.tensor([4, 3, 4, 0, 1, 4]),
        token_BQ=token_BQ,
    )
    after, runs = commit_runs_ref(drawn_T.flatten(), is_drawn_T.flatten(), state)
    assert runs.emitted_BQ.tolist() == [
        [5, 6, 8, -1], [4, -1, -1, -1], [5, 6, 7, 8], [-1, -1, -1, -1], [5, -1, -1, -1], [5, 1, -1, -1]
    ]  # fmt: skip
    assert runs.num_emitted_B.tolist() == [3, 1, 4, 0, 1, 2]
    assert runs.drawable_B.tolist() == [True, False, True, True, True, True]
    assert runs.start_B.tolist() == [9, 19, 29, 39, 49, 59]
    assert runs.last_row_B.tolist() == [2, 4, 11, 12, 16, 21]
    assert after.length_B.tolist() == [13, 21, 34, 40, 51, 62]
    assert after.token_BQ[:, 0].tolist() == [8, 4, 8, 9, 5, 1]
    assert after.num_rows_B.tolist() == [4, 2, 0, 0, 0, 4]
    assert runs.num_recycled_B.tolist() == [2, 0, 0, 0, 0, 2]


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(CASES + "\ncheck('cpu')\n", tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*i64", "*i1", *["*i64"] * 6, "*i1", *["*i64"] * 5)
    sizes = {"ROWS": 6, "BLOCK": 8, "STARTS_EARLY": True}
    options = {"num_warps": 1}
    kernel = "commit_runs.commit_runs_kernel"
    assert ptx_for_hopper(kernel, tmp_path, types=types, constants=sizes, options=options)


def test_a_state_of_another_shape_is_refused() -> None:
    device = torch.device("cpu")
    state, out = RunState.zeros(2, 3, device=device), CommittedRuns.empty(2, 4, device=device)
    with pytest.raises(ValueError, match=r"emitted_BQ must be torch.int64 \(2, 3\).* got torch.int64 \(2, 4\)"):
        commit_runs(torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.bool), state, out=out)


@needs_gpu
def test_a_gpu_gives_what_the_definition_gives() -> None:
    scope: dict[str, object] = {}
    exec(CASES, scope)
    scope["check"]("cuda")  # type: ignore[operator]
