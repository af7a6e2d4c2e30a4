"""What the matrices of the engine's tests are made of: number formats, mixed batches of requests, draft sources."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from specdec.dcp.layout import KvFormat
from specdec.drafting.draft import DraftSource
from specdec.drafting.scripted_draft import ScriptedDraft, random_draft
from specdec.models.glm.mtp import MtpIndexSharing
from tests.support.engines import VOCAB_SIZE, Ask, drawn, flipping_draft, greedy, prompt_of, script_of
from tests.support.pairwise import Row

NUMBERS: Mapping[str, tuple[torch.dtype, KvFormat | None]] = {
    "float32": (torch.float32, None),
    "bfloat16 cache": (torch.float32, KvFormat.BFLOAT16),
    "fp8 cache": (torch.float32, KvFormat.FP8),
    "packed fp8 cache": (torch.float32, KvFormat.FP8_PACKED),
    "bfloat16": (torch.bfloat16, None),
}


def name_of(row: Row) -> str:
    return "-".join(str(value).replace(" ", "_") for value in row.values())


def asks_of(
    temperature: str, *, num_drafts: int, lengths: Sequence[int] | None = None, logprobs: int | None = None
) -> list[Ask]:
    """Eight requests of different lengths and rules.

    Some prompts are shorter than a run of drafts, some prompts and outputs end around page borders, and some rules make
    a row's distribution depend on the drafts before it.

    Args:
        temperature: "zero", "one", or "both" in turn.
        num_drafts: Drafts of a round, for the lengths.
        lengths: Of the prompts; None takes some around the number of drafts.
        logprobs: As in `SamplingParams`.
    """
    lengths = lengths or (9, 1, 62, num_drafts + 1, 2, 17, num_drafts + 3, 4)
    outputs = (11, 12, 9, 13, 7, 12, 1, 8)
    rules: Sequence[dict[str, Any]] = (
        {},
        {},
        {"repetition_penalty": 1.3},
        {"top_k": 20, "top_p": 0.9},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"min_p": 0.05, "logit_bias": {7: 4.0, 8: -100.0}},
        {},
        {"stop_token_ids": list(range(0, VOCAB_SIZE, 5)), "min_tokens": 3},
    )
    asks = []
    for index, (length, max_tokens, rule) in enumerate(zip(lengths, outputs, rules, strict=True)):
        is_greedy = temperature == "zero" or (temperature == "both" and index % 2 == 0)
        ask = partial(greedy, seed=index) if is_greedy else partial(drawn, index)
        asks.append(Ask(prompt_of(length, seed=index), ask(max_tokens, logprobs=logprobs, **rule)))
    return asks


def source_of(
    draft: MtpIndexSharing | str, asks: Sequence[Ask], outputs: Sequence[Sequence[int]], *, num_drafts: int
) -> DraftSource | None:
    """The draft source that an axis value names; None for the MTP layer."""
    script = script_of(asks, outputs)
    match draft:
        case MtpIndexSharing():
            return None
        case "random":
            return random_draft(vocab_size=VOCAB_SIZE, seed=0)
        case "flipping":
            return flipping_draft(script, right=0.7, seed=0)
        case "oracle":
            wrong_at = None
        case "first wrong":
            wrong_at = 0
        case "second wrong":
            wrong_at = 1
        case "last wrong":
            wrong_at = num_drafts - 1
        case _:
            raise AssertionError(f"no such draft source: {draft}")
    return ScriptedDraft(script, vocab_size=VOCAB_SIZE, wrong_at=wrong_at)
