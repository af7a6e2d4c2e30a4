"""How many drafts `glm-tiny` keeps: by draft length, by how drafts are drawn, and by what draft steps attend to.

Prompts are held-out files of the Python standard library, continued by the model. Acceptance length is the mean number
of tokens a round with drafts emits, the bonus token included.

Run: python benchmarks/acceptance.py [--num-prompts N] [--json]
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec import Engine, EngineConfig, SamplingParams
from specdec.drafting.draft import DraftBatch, Drafts, DraftSource, ObservedRows
from specdec.models.glm.checkpoint import LoadedCheckpoint, load_checkpoint
from specdec.models.glm.mtp import MtpIndexSharing
from specdec.models.glm.released import locate_checkpoint
from specdec.request import SpeculationStats
from specdec.sampling.accept import AcceptanceRule
from specdec.sampling.sampling_rows import RequestSampling, SamplingBatch
from specdec.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from glm_tiny.corpus import standard_library  # the training script's own split

NUM_NEW_TOKENS = 64
SHORT_PROMPT, LONG_PROMPT = 128, 640  # below and beyond glm-tiny's index_topk of 256


class GreedyDraft:
    """Hands another source requests of temperature 0, so that it proposes its most likely tokens."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source

    def observe(self, rows: ObservedRows) -> None:
        """Pass on what the target computed."""
        self._source.observe(rows)

    def propose(self, batch: DraftBatch) -> Drafts:
        """Propose without noise, whatever the requests sample with."""
        greedy = RequestSampling(
            SamplingParams(temperature=0), choice=0, prompt_ids=[0], stop_ids=(), vocab_size=1 << 20
        )
        sampling = SamplingBatch([greedy] * len(batch.requests), device=batch.sampling.device)
        return self._source.propose(dataclasses.replace(batch, sampling=sampling))


def measure(
    checkpoint: LoadedCheckpoint,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    greedy_draft: bool = False,
    **settings: Any,
) -> SpeculationStats:
    """Generate from every prompt and add up how drafting went."""
    engine = Engine(
        checkpoint,
        EngineConfig(max_num_requests=len(prompts), prefill_chunk_tokens=1024, prefix_cache=False, **settings),
    )
    if greedy_draft and engine.core.draft is not None:
        engine.core.draft = GreedyDraft(engine.core.draft)
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    return sum((result.speculation for result in engine.generate(prompts, params)), SpeculationStats())


def cases() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, prompt length and settings of each measurement."""
    for num_draft_tokens in (1, 2, 3, 5):
        yield f"greedy, K={num_draft_tokens}", SHORT_PROMPT, {"temperature": 0, "num_draft_tokens": num_draft_tokens}
    sampled: dict[str, Any] = {"temperature": 1, "num_draft_tokens": 3}
    yield "temperature 1, K=3, greedy draft", SHORT_PROMPT, {**sampled, "greedy_draft": True}
    yield "temperature 1, K=3, shared noise", SHORT_PROMPT, sampled
    yield "temperature 1, K=3, rejection", SHORT_PROMPT, {**sampled, "acceptance": AcceptanceRule.REJECTION}
    for sharing in MtpIndexSharing:
        settings = {"temperature": 0, "num_draft_tokens": 5, "mtp_index_sharing": sharing}
        yield f"greedy, K=5, index sharing {sharing.value}", LONG_PROMPT, settings


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    directory = locate_checkpoint("glm-tiny")
    checkpoint = load_checkpoint(directory, dtype=torch.float32)
    tokenizer = Tokenizer(directory / "tokenizer.json")
    texts = [document.text for document in standard_library() if document.held_out and document.kind == "code"]
    encoded = [tokens for tokens in map(tokenizer.encode, texts) if len(tokens) >= LONG_PROMPT]
    prompts = encoded[:: max(1, len(encoded) // arguments.num_prompts)][: arguments.num_prompts]
    results = {}
    for name, length, settings in cases():
        stats = measure(checkpoint, [tokens[:length] for tokens in prompts], **settings)
        rates = [kept / stats.num_drafts for kept in stats.accepted_per_position]
        results[name] = {"acceptance_length": stats.acceptance_length, "kept_per_position": rates}
        if not arguments.json:
            shown = " ".join(f"{rate:.2f}" for rate in rates)
            print(f"{name:42s} acceptance length {stats.acceptance_length:.2f}   kept per position {shown}", flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
