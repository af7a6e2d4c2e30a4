"""Tokens a second of `glm-tiny` by draft length: fixed ones, and the one that each round chooses.

B requests continue held-out files of the Python standard library; where B is small, several such batches, one after
the other. The engines, one a length, take turns of a few rounds, so that whatever else runs on the machine slows them
alike. The rounds in which an engine tries every length for the first time are not counted; those in which it tries a
neighbour later are.

Run: python benchmarks/draft_length.py [--num-requests 1,4,16,32] [--num-rounds N] [--json]
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from specdec import Engine, EngineConfig, SamplingParams
from specdec.models.glm.checkpoint import LoadedCheckpoint, load_checkpoint
from specdec.models.glm.released import locate_checkpoint
from specdec.result import StreamDelta
from specdec.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from glm_tiny.corpus import standard_library  # the training script's own split

MOST = 5
PROMPT_LENGTH = 128
MAX_MODEL_LEN = 768
LEAST_REQUESTS = 8  # of a case, over all its batches
NUM_FIRST_ROUNDS = 3 * (MOST + 1)
TURN = 4  # rounds
AUTO = "auto"


class Decoding:
    """An engine that decodes for B requests which do not end.

    Args:
        checkpoint: The model.
        prompts: One a request.
        temperature: Of all requests.
        length: Drafts of a round, or auto.
    """

    def __init__(
        self, checkpoint: LoadedCheckpoint, prompts: Sequence[Sequence[int]], *, temperature: float, length: int | str
    ) -> None:
        config = EngineConfig(
            num_draft_tokens=MOST if length == AUTO else int(length),
            is_draft_length_auto=length == AUTO,
            max_num_requests=len(prompts),
            max_model_len=MAX_MODEL_LEN,
            prefill_chunk_tokens=len(prompts) * PROMPT_LENGTH,
            prefix_cache=False,
        )
        self.num_tokens = 0
        self.seconds = 0.0
        self.engine = Engine(checkpoint, config)
        for seed, prompt in enumerate(prompts):
            params = SamplingParams(temperature=temperature, seed=seed, ignore_eos=True)
            self.engine.prepare(prompt, params, on_delta=self._count).start()
        self.engine.step()
        for _ in range(NUM_FIRST_ROUNDS):
            self.engine.step()
        self.num_tokens = 0

    def run(self, num_rounds: int) -> None:
        """Run rounds and count what they give."""
        started_at = time.perf_counter()
        for _ in range(num_rounds):
            self.engine.step()
        self.seconds += time.perf_counter() - started_at

    def _count(self, piece: StreamDelta) -> None:
        if piece.finish_reason is not None:
            raise RuntimeError("a request has ended: lower --num-rounds or raise MAX_MODEL_LEN")
        self.num_tokens += len(piece.token_ids)


def measure(
    checkpoint: LoadedCheckpoint, batches: Sequence[Sequence[Sequence[int]]], *, temperature: float, num_rounds: int
) -> dict[str, float]:
    """Tokens a second of all requests of a batch together, by draft length."""
    lengths = (*range(MOST + 1), AUTO)
    num_tokens = dict.fromkeys(map(str, lengths), 0)
    seconds = dict.fromkeys(map(str, lengths), 0.0)
    for prompts in batches:
        each = {
            str(length): Decoding(checkpoint, prompts, temperature=temperature, length=length) for length in lengths
        }
        for _ in range(num_rounds // TURN):
            for decoding in each.values():
                decoding.run(TURN)
        for name, decoding in each.items():
            num_tokens[name] += decoding.num_tokens
            seconds[name] += decoding.seconds
    return {name: num_tokens[name] / seconds[name] for name in num_tokens}


def cases(numbers: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Numbers of requests and temperatures."""
    for num_requests in numbers:
        for temperature in (0.0, 1.0):
            yield num_requests, temperature


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", default="1,4,16,32", help="how many decode together, several numbers")
    parser.add_argument("--num-rounds", type=int, default=64, help="rounds of a batch that are counted, of each length")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    directory = locate_checkpoint("glm-tiny")
    checkpoint = load_checkpoint(directory, dtype=torch.float32)
    tokenizer = Tokenizer(directory / "tokenizer.json")
    texts = [document.text for document in standard_library() if document.held_out and document.kind == "code"]
    encoded = [
        tokens[begin : begin + PROMPT_LENGTH]
        for tokens in map(tokenizer.encode, texts)
        for begin in range(0, len(tokens) - PROMPT_LENGTH + 1, PROMPT_LENGTH)
    ]
    results = {}
    for num_requests, temperature in cases([int(number) for number in arguments.num_requests.split(",")]):
        load = os.getloadavg()[0]
        num_batches = -(-LEAST_REQUESTS // num_requests)
        prompts = encoded[:: len(encoded) // (num_batches * num_requests)]
        batches = [prompts[batch * num_requests : (batch + 1) * num_requests] for batch in range(num_batches)]
        rates = measure(checkpoint, batches, temperature=temperature, num_rounds=arguments.num_rounds)
        results[f"{num_requests} requests, temperature {temperature:g}"] = rates
        if not arguments.json:
            shown = "  ".join(f"{length} {rate:6.1f}" for length, rate in rates.items())
            print(f"{num_requests:3d} requests, temperature {temperature:g}: {shown}   (load {load:.1f})", flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
