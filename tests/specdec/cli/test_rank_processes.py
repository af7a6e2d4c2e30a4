"""Commands over several ranks as a shell sees them: their output, exit codes, and no process left."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.specdec.cli.conftest import Run
from tests.support.engines import SPARSE, write_engine_checkpoint
from tests.support.processes import await_end, children_of

LONG_S = 120.0  # far above anything that ends, on whatever machine
COMMAND = [sys.executable, "-m", "specdec"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LONG = replace(SPARSE, max_position_embeddings=2048)
RANKS = ["--tp-size", "2", "--dcp-size", "2"]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_engine_checkpoint(tmp_path_factory.mktemp("small") / "model", LONG))


def generate(model: str, *, max_tokens: int) -> list[str]:
    command = ["generate", "--model", model, "--prompt-ids", "5,6,7", "--temperature", "0", "--ignore-eos", "--json"]
    return [*command, "--max-tokens", str(max_tokens), "--page-size", "4"]


@contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A command that has printed its first line, which is dropped; killed at the end if it still runs."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline()
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run_whole(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)


def test_ranks_of_torchrun_print_what_one_rank_prints(run: Run, small_model: str) -> None:
    alone = run(*generate(small_model, max_tokens=12))
    assert alone.exit_code == 0, alone.err
    launched = run_whole(
        [
            *TORCHRUN,
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "specdec",
            *generate(small_model, max_tokens=12),
            *RANKS,
        ]
    )
    assert launched.returncode == 0, launched.stderr
    records = [json.loads(line) for line in launched.stdout.splitlines()]
    assert len(records) == 1
    assert records[0]["token_ids"] == json.loads(alone.out)["token_ids"]


def test_killed_rank_ends_the_command_with_its_own_exit_code_and_one_line(small_model: str) -> None:
    with running([*COMMAND, *generate(small_model, max_tokens=2000), "--stream", *RANKS]) as process:
        followers = children_of(process.pid)
        assert len(followers) == 1
        os.kill(min(followers), signal.SIGKILL)
        out, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 4
    for line in out.splitlines():
        json.loads(line)
    lines = err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"specdec: rank 1 is gone: its process {min(followers)} was killed by signal SIGKILL")
    assert await_end(followers, timeout_s=LONG_S) == set()


@pytest.mark.full
def test_started_ranks_print_what_one_rank_prints(run: Run, small_model: str) -> None:
    alone = run(*generate(small_model, max_tokens=12))
    started = run_whole([*COMMAND, *generate(small_model, max_tokens=12), *RANKS])
    assert started.returncode == 0
    assert started.stderr == ""
    assert json.loads(started.stdout)["token_ids"] == json.loads(alone.out)["token_ids"]


@pytest.mark.full
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_command_that_is_ended_leaves_no_process(number: signal.Signals, exit_code: int, small_model: str) -> None:
    command = [*COMMAND, *generate(small_model, max_tokens=2000), "--stream", "--tp-size", "4", "--dcp-size", "2"]
    with running(command) as process:
        followers = children_of(process.pid)
        assert len(followers) == 3
        process.send_signal(number)
        process.communicate(timeout=LONG_S)
    assert process.returncode == exit_code
    assert await_end(followers, timeout_s=LONG_S) == set()


@pytest.mark.full
@pytest.mark.parametrize("arguments", [["--version"], ["generate", "--model", "nowhere", "--prompt", "x", *RANKS]])
def test_ranks_of_torchrun_end_with_a_command_that_needs_none(arguments: list[str]) -> None:
    launched = run_whole([*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "specdec", *arguments])
    alone = run_whole([*COMMAND, *arguments])
    assert (launched.returncode == 0) == (alone.returncode == 0)
    assert launched.stdout == alone.stdout
    assert alone.stderr in launched.stderr


@pytest.mark.full
@pytest.mark.parametrize("sizes", [[], ["--tp-size", "4"]])
def test_other_number_of_ranks_than_torchrun_started_is_refused(sizes: list[str], small_model: str) -> None:
    launched = run_whole(
        [
            *TORCHRUN,
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "specdec",
            *generate(small_model, max_tokens=4),
            *sizes,
        ]
    )
    assert launched.returncode != 0
    assert "but the launcher started 2 processes (WORLD_SIZE)" in launched.stderr


@pytest.mark.full
def test_two_hosts_serve_one_engine(run: Run, small_model: str) -> None:
    """Two agents of torchrun that find each other as those of two hosts do."""
    alone = run(*generate(small_model, max_tokens=12))
    with socket.create_server(("localhost", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "-m", "specdec"]
    command += [*generate(small_model, max_tokens=12), "--tp-size", "4", "--dcp-size", "4"]
    hosts = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [host.communicate(timeout=LONG_S) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    records = [json.loads(line) for out, _ in outputs for line in out.splitlines()]
    assert len(records) == 1
    assert records[0]["token_ids"] == json.loads(alone.out)["token_ids"]
