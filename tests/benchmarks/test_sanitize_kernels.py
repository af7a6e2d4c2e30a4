"""The sanitizer's run: its selections select, its verdicts are told apart."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "sanitize_kernels.py"

# Reports success for all kernels but two: a race in the merge, and a run that skips everything.
SANITIZER = """#!/bin/sh
case "$*" in
  *"--tool racecheck"*test_shard_merge.py*) echo "3 passed in 1 s"; exit 86;;
  *"--tool initcheck"*test_joined_norms.py*) echo "3 skipped in 1 s"; exit 0;;
  *"--tool memcheck"*test_pack_rows.py*) echo "ImportError"; exit 2;;
  *) echo "3 passed in 1 s"; exit 0;;
esac
"""

COLLECTS = """
import sys
import pytest

sys.path.insert(0, "benchmarks")
from sanitize_kernels import SELECTIONS, kernels

class Selected:
    def pytest_collection_finish(self, session):
        self.names = [item.name for item in session.items if any(item.iter_markers("skipif"))]
        self.others = [item.name for item in session.items if item.name not in self.names]

assert SELECTIONS.keys() <= set(kernels()), SELECTIONS.keys() - set(kernels())
for kernel, selection in SELECTIONS.items():
    selected = Selected()
    command = ["--collect-only", "-q", "-p", "no:cacheprovider", f"tests/kernels/test_{kernel}.py", "-k", selection]
    assert pytest.main(command, plugins=[selected]) == 0, kernel
    assert selected.names and len(selected.names) <= 8, (kernel, selected.names)
    assert not selected.others, (kernel, selected.others)
"""


def run(path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{path}:/usr/bin:/bin", "TMPDIR": str(path)}
    return subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)


def test_every_selection_selects_a_few_tests_of_a_gpu_and_no_others() -> None:
    ran = subprocess.run([sys.executable, "-c", COLLECTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr


def test_each_kernel_has_a_line_and_any_finding_fails_the_run(tmp_path: Path) -> None:
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(SANITIZER)
    sanitizer.chmod(0o755)
    ran = run(tmp_path)
    assert ran.returncode == 1
    lines = dict(line.split(": ", 1) for line in ran.stdout.splitlines())
    assert "racecheck found something (" in lines["shard_merge"]
    assert "initcheck ran nothing: is there a GPU? (" in lines["joined_norms"]
    assert "memcheck exit status 2 (" in lines["pack_rows"]
    assert "gumbel_noise" not in lines
    assert "racecheck" not in lines["moe_experts"]
    kernel, others = lines["add_rms_norm"], ("shard_merge", "joined_norms", "pack_rows")
    assert [part.split(" (")[0] for part in kernel.split(", ")] == [
        f"{tool} clean" for tool in ("memcheck", "synccheck", "racecheck", "initcheck")
    ]
    assert all(line.count("clean") in {2, 4} for name, line in lines.items() if name not in others)


@pytest.mark.skipif(Path("/usr/local/cuda/bin/compute-sanitizer").exists(), reason="the sanitizer is there")
def test_a_missing_sanitizer_is_told_in_one_line(tmp_path: Path) -> None:
    ran = run(tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("compute-sanitizer is missing")
    assert ran.stderr.count("\n") == 1
