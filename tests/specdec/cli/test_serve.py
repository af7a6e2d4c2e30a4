"""`specdec serve` as people start and stop it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import httpx
import pytest

from tests.specdec.cli.conftest import Run

pytestmark = pytest.mark.xdist_group("serve_processes")
FLAGS = ("--model", "glm-tiny", "--port", "0", "--max-model-len", "1024", "--max-num-requests", "4")


@contextmanager
def serving(*flags: str, environment: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec", "serve", *FLAGS, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.stderr.read() if process.stderr else ""
        yield process, url
    finally:
        process.kill()
        process.wait(timeout=60)


def read_in_background(pipe: IO[str] | None) -> list[str]:
    assert pipe is not None
    lines: list[str] = []
    threading.Thread(target=lambda: lines.extend(pipe), daemon=True).start()
    return lines


def test_server_answers_and_finishes_its_streams_before_it_ends() -> None:
    with serving("--served-model-name", "tiny", "--num-draft-tokens", "2") as (process, url):
        log = read_in_background(process.stderr)
        with httpx.Client(base_url=url, timeout=60) as client:
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
            body = {"prompt": "def f", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
            whole = client.post("/v1/completions", json=body).json()
            assert whole["usage"]["completion_tokens"] == 120
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                pieces = response.iter_lines()
                text = next(pieces)
                process.send_signal(signal.SIGTERM)
                lines = [text, *pieces]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
        assert "data: [DONE]" in lines
        assert process.wait(timeout=60) == 0
    requests = [json.loads(line) for line in log if line.startswith("{")]
    assert [line["path"] for line in requests] == ["/v1/models", "/v1/completions", "/v1/completions"]
    assert not any("def f" in line for line in log)


def test_interrupted_server_has_the_exit_code_of_an_interrupt() -> None:
    with serving(environment={"SPECDEC_API_KEY": "secret"}) as (process, url):
        with httpx.Client(base_url=url, timeout=60) as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
            assert client.get("/ready").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-queued-requests", "-1"), "max_queued_requests must be >= 0, got -1"),
        (("--request-timeout-s", "0"), "request_timeout_s must be positive"),
        (("--client-timeout-s", "nan"), "client_timeout_s must be positive"),
        (("--max-body-bytes", "none"), "a size is a number"),
        (("--api-key", " x"), "api_key must not be empty"),
        (("--served-model-name", ""), "served_model_name"),
        (("--port", "70000"), "--port"),
    ],
)
def test_settings_are_checked_before_anything_is_loaded(run: Run, flags: tuple[str, ...], message: str) -> None:
    outcome = run("serve", "--model", "no-such-model", *flags)
    assert outcome.exit_code == 2
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_address_in_use_is_said(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = run("serve", "--model", "glm-tiny", "--port", port, "--max-model-len", 64, "--num-pages", 8)
    assert outcome.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in outcome.err


def test_missing_package_is_said_with_what_installs_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    outcome = run("serve", "--model", "glm-tiny")
    assert outcome.exit_code == 2
    assert "pip install 'specdec[serve]'" in outcome.err
    assert "uvicorn" in outcome.err
