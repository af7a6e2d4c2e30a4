"""Prefill and decode in processes of their own: two prefills, one decode group, one text.

    python examples/disaggregated.py [--transport local|mooncake|nixl] [--model glm-tiny] [--devices cuda:0 cuda:1]

Starts `specdec prefill` twice, has the prompts computed there, decodes here, and compares with an engine that computes
its prompts itself. Prefills run on the first device, which they share, and decode on the second; KV goes from GPU to
GPU or from host to host. The exit code is 1 if the texts differ.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from specdec import Engine, SamplingParams

SETTINGS = {"max_model_len": 1024, "page_size": 16}
PROMPTS = (
    "def read_lines(path):",
    'class Stack:\n    """A last-in, first-out queue."""\n\n    def __init__(self):',
    "import os\n\n\ndef walk(root):\n    for directory, _, names in os.walk(root):\n",
)


@contextmanager
def prefill(model: str, transport: str, device: str) -> Iterator[str]:
    """Start a prefill in a process of its own; gives its address."""
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--model", model, "--transport", transport, "--device", device]
    command = [sys.executable, "-m", "specdec", "prefill", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise SystemExit("the prefill did not start; its messages stand above")
            yield address
        finally:
            process.terminate()


def generate(engine: Engine) -> Sequence[tuple[int, ...]]:
    """Continue the prompts, greedily."""
    results = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=48))
    for prompt, result in zip(PROMPTS, results, strict=True):
        print(f"--- {prompt.splitlines()[0]}\n{prompt}{result.choices[0].text}")
    return [result.choices[0].token_ids for result in results]


def main() -> int:
    """Generate both ways and compare; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="glm-tiny")
    parser.add_argument("--transport", default="local")
    parser.add_argument("--devices", nargs=2, default=("cpu", "cpu"), help="of the prefills, and of decode")
    arguments = parser.parse_args()
    model, transport, (there, here) = arguments.model, arguments.transport, arguments.devices
    with ExitStack() as stack:
        addresses = [stack.enter_context(prefill(model, transport, there)) for _ in range(2)]
        with Engine.from_pretrained(model, device=here, prefill=addresses, transport=transport, **SETTINGS) as decode:
            token_ids = generate(decode)
            assert decode.intake is not None
            counts = decode.intake.counts
            print(f"\n{counts.num_received} prompts received, {counts.wait_s / counts.num_received:.3f} s each")
    with Engine.from_pretrained(model, device=here, **SETTINGS) as monolithic:
        is_equal = token_ids == generate(monolithic)
    print("equal to one engine:", is_equal)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
