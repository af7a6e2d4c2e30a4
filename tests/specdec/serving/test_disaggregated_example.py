"""The deployment that `examples/` starts by one command answers and ends in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import await_end, children_of

pytestmark = pytest.mark.xdist_group("serve_processes")
EXAMPLE = Path(__file__).parents[3] / "examples" / "serve_disaggregated.py"


def test_two_prefills_and_a_decode_group_answer_by_one_command() -> None:
    before = children_of(os.getpid())
    run = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    assert re.search(r"clients call http://127\.0\.0\.1:\d+; prompts are computed at 127", run.stdout)
    assert sorted(re.findall(r"has computed (\d+) prompts", run.stdout)) == ["0", "1"]
    assert "'completion_tokens'" in run.stdout
    assert not await_end(children_of(os.getpid()) - before, timeout_s=10)
