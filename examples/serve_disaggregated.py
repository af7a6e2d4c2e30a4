"""A server whose prompts are computed by others: two prefills and one decode group of two ranks, on this machine.

    python examples/serve_disaggregated.py [--model glm-tiny] [--transport local|mooncake|nixl] [--prompt TEXT]

Starts `specdec serve --role prefill` twice and `specdec serve --role decode` once, asks the latter as any client of the
OpenAI API would, prints the answer and who computed the prompt, and ends them all.
"""

import argparse
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

SETTINGS = ("--max-model-len", "1024", "--page-size", "16", "--port", "0")


@contextmanager
def server(role: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Start a server; SIGTERM ends it with the block."""
    command = [sys.executable, "-m", "specdec", "serve", "--role", role, *flags, *SETTINGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
    if process.returncode:
        raise SystemExit(f"the server with role {role} ended with exit code {process.returncode}")


def next_address(process: subprocess.Popen[str]) -> str:
    """Wait for the next address that a server prints: first that for clients, then that for decode groups."""
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address:
        raise SystemExit("a server did not start; its messages stand above")
    return address


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    """Get something, or post JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        text: str = response.read().decode()
    return text


def main() -> None:
    """Start them, ask once, end them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="glm-tiny")
    parser.add_argument("--transport", default="local")
    parser.add_argument("--prompt", default="Write a function that reads a file.")
    arguments = parser.parse_args()
    common = ("--model", arguments.model, "--transport", arguments.transport)
    with ExitStack() as stack:
        prefills = [stack.enter_context(server("prefill", *common)) for _ in range(2)]
        urls = {next_address(prefill): next_address(prefill) for prefill in prefills}
        handoff = [word for address in urls.values() for word in ("--prefill", address)]
        decode = stack.enter_context(server("decode", *common, "--tp-size", "2", "--dcp-size", "2", *handoff))
        url = next_address(decode)
        print(f"clients call {url}; prompts are computed at {' and '.join(urls.values())}")
        body = {"messages": [{"role": "user", "content": arguments.prompt}], "max_tokens": 64, "temperature": 0}
        answer = json.loads(fetch(f"{url}/v1/chat/completions", body))
        print(f"--- {arguments.prompt}\n{answer['choices'][0]['message']['content']}\n--- {answer['usage']}")
        for prefill_url, address in urls.items():
            done = re.search(r'specdec:transfers_total{.*outcome="done"} (\d+)', fetch(f"{prefill_url}/metrics"))
            print(f"{address} has computed {done[1] if done else 0} prompts")


if __name__ == "__main__":
    main()
