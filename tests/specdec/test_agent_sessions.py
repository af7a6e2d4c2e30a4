"""Agents send what they have sent before, and more: all of it but the last page is reused, with its draft KV.

What is reused must change nothing: neither a token nor how many drafts are accepted at which place. The sessions are
those of the trace files, shortened.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from specdec.bench.workload import Workload
from specdec.engine import Engine
from specdec.request import SpeculationStats
from specdec.result import GenerationResult
from tests.support.agent_sessions import agent_sessions, common_prefix, conversations, replay
from tests.support.engines import FIRST_SPECIAL_ID, Checkpoints, greedy
from tests.support.handoff import Groups
from tests.support.thread_engine import ThreadEngines

MODEL, MAX_CONTEXT, PAGE_SIZE, NUM_DRAFTS = "parallel_long", 1100, 4, 3
SETTINGS: dict[str, Any] = {"page_size": PAGE_SIZE, "max_model_len": 1200, "prefill_chunk_tokens": 256}
GROUP: dict[str, Any] = {**SETTINGS, "num_draft_tokens": NUM_DRAFTS, "max_num_requests": 4, "num_pages": 2400}
WORKLOADS = {
    "agents": agent_sessions(divisor=64, max_context=MAX_CONTEXT),
    "conversations": conversations(divisor=16, max_context=MAX_CONTEXT).limited(max_requests=12),
}


def results_of(engine: Engine, workload: Workload) -> list[GenerationResult]:
    """Ask an engine everything, one after the other."""
    results: list[GenerationResult] = []

    def answer(prompt: tuple[int, ...], num_tokens: int) -> Sequence[int]:
        results.extend(engine.generate(prompt, greedy(max(2, num_tokens))))
        return results[-1].token_ids

    for _ in replay(workload, answer, vocab_size=FIRST_SPECIAL_ID):
        pass
    return results


def check_reuse(results: Sequence[GenerationResult]) -> None:
    """Check that each request reused whatever earlier ones had in common with it, but for a page at the end.

    A page is known with the token behind it. Of a reply, the last run has no draft KV that could be reused.
    """
    reusable: list[tuple[int, ...]] = []
    for result in results:
        prompt = result.prompt_token_ids
        shared = max((common_prefix(prompt, known) for known in reusable), default=0)
        least = max(0, shared - 1) // PAGE_SIZE * PAGE_SIZE
        assert least <= result.usage.num_cached_tokens < max(1, len(prompt))
        reusable.append(prompt + result.token_ids[: max(0, len(result.token_ids) - NUM_DRAFTS - 1)])


def check_same(warm: Sequence[GenerationResult], cold: Sequence[GenerationResult]) -> None:
    """Check that reuse changed nothing, request by request and so in all."""
    assert [result.token_ids for result in warm] == [result.token_ids for result in cold]
    assert [result.choices[0].speculation for result in warm] == [result.choices[0].speculation for result in cold]
    total = sum((result.choices[0].speculation for result in warm), SpeculationStats())
    assert 0 < total.num_accepted_tokens < total.num_draft_tokens  # else it would show nothing


@pytest.mark.parametrize("name", WORKLOADS)
def test_sessions_reuse_all_but_the_last_page_and_accept_the_same_drafts(name: str, checkpoints: Checkpoints) -> None:
    settings = {**SETTINGS, "num_draft_tokens": NUM_DRAFTS, "num_pages": 6000}
    warm = results_of(checkpoints.engine(MODEL, **settings), WORKLOADS[name])
    cold = results_of(checkpoints.engine(MODEL, **settings, prefix_cache=False), WORKLOADS[name])
    check_same(warm, cold)
    check_reuse(warm)
    assert all(result.usage.num_cached_tokens == 0 for result in cold)


def test_both_sides_of_a_hand_off_reuse_all_but_the_last_page(
    checkpoints: Checkpoints, thread_engines: ThreadEngines
) -> None:
    """The prefill knows prompts, the group replies, too; what it has is written by nobody again."""
    workload = WORKLOADS["conversations"].limited(max_requests=6)
    groups = Groups(checkpoints, thread_engines, model=MODEL)
    with (
        groups.prefill(**SETTINGS, num_pages=6000) as prefill,
        groups.decode(prefill, tp_size=2, dcp_size=2, **GROUP) as engine,
    ):
        warm = results_of(engine, workload)
        counts = prefill.server.counts
        layout = prefill.worker.pool.layout
        row_bytes = layout.latent.bytes_per_token * layout.num_latent_layers
    with thread_engines.open(MODEL, tp_size=2, dcp_size=2, **GROUP, prefix_cache=False) as alone:
        cold = results_of(alone.engine(), workload)
    check_same(warm, cold)
    check_reuse(warm)
    prompts = [result.prompt_token_ids for result in warm]
    found = 0
    for place, prompt in enumerate(prompts):
        shared = max((common_prefix(prompt, earlier) for earlier in prompts[:place]), default=0)
        found += max(0, shared - 1) // PAGE_SIZE * PAGE_SIZE
    assert counts.num_prompt_tokens == sum(map(len, prompts))
    assert counts.num_cached_tokens == found
    # Written were the rows that the group did not have, whatever the prefill had.
    num_rows = sum(len(prompt) - result.usage.num_cached_tokens for prompt, result in zip(prompts, warm, strict=True))
    num_bytes = [counts.paths[0, rank, "target.latent"].num_bytes for rank in range(2)]
    assert sum(num_bytes) == num_rows * row_bytes
    assert all(num_bytes)
