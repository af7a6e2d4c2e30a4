"""Pages and ids when ranks share requests: fresh memory, memory used many times over, prefixes, short requests.

Tags such as A1 and O16 are explained in `tests/INVARIANTS.md`.
"""

import itertools

import numpy as np
import pytest
import torch

from specdec.dcp.metadata import build_metadata
from specdec.ranks.worker import Worker
from tests.support.engines import Ask, CoreRun, drawn, greedy, prompt_of, serve, tokens
from tests.support.thread_engine import ThreadEngine, ThreadEngines

PROBE = Ask(prompt_of(45, seed=9), greedy(6))


@pytest.mark.parametrize("ranks", [(2, 2), (4, 4), (8, 8)])
def test_prompts_that_leave_ranks_without_keys_equal_one_rank(
    ranks: tuple[int, int], thread_engines: ThreadEngines
) -> None:
    """O15, A14, B5, B6, B7: one at a time, so that rows are padded; every rank's unused memory is NaN."""
    lengths = range(1, 2 * ranks[1] + 2)
    asks = [Ask(prompt_of(length), greedy(3, logprobs=0)) for length in lengths]
    expected = thread_engines.plain(asks, tp_size=1, dcp_size=1, page_size=1)
    with thread_engines.open(
        tp_size=ranks[0], dcp_size=ranks[1], num_draft_tokens=2, page_size=1, prefix_cache=False
    ) as running:
        running.poison()
        engine = running.engine()
        results = [serve(engine, [ask])[0] for ask in asks]
    assert tokens(results) == tokens(expected)
    for result, right in zip(results, expected, strict=True):
        ours, theirs = ([entry.raw_logprob for entry in each.choices[0].logprobs or ()] for each in (result, right))
        assert np.isfinite(ours).all()
        assert np.abs(np.array(ours) - theirs).max() < 1e-4


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_answer_of_a_probe_stays_while_ids_pass_every_bound(prefix_cache: bool, thread_engines: ThreadEngines) -> None:
    """O16, A1, A2, A3, A5, A8, B11: fresh memory first, then every id of 64 many times over."""
    generator = np.random.default_rng(0)
    (expected,) = tokens(thread_engines.plain([PROBE], tp_size=2, dcp_size=2))
    with thread_engines.open(
        tp_size=2,
        dcp_size=2,
        num_draft_tokens=1,
        num_pages=32,
        max_model_len=64,
        max_num_requests=8,
        prefill_chunk_tokens=128,
        prefix_cache=prefix_cache,
    ) as running:
        running.poison()
        run = running.core_run()
        seen: set[int] = set()
        probes = []
        for index in range(200):
            length = int(generator.integers(20, 61))
            if index % 10 == 0:
                probes.append(run.add(PROBE))
            run.add(Ask(prompt_of(length, seed=index), greedy(1 + index % 4)))
            while len(run.core.scheduler.waiting) > 4 and run.step():
                seen.update(run.core.slots.page_id_SP[run.core.slots.active_S].ravel().tolist())
        while run.step():
            seen.update(run.core.slots.page_id_SP[run.core.slots.active_S].ravel().tolist())
        outputs = run.delivered()
        assert all(outputs[probe.request_id] == expected for probe in probes)
        assert len(probes) == 20
        assert len(seen - {-1}) > 60
        scheduler = run.core.scheduler
        assert scheduler.num_available_pages() == scheduler.allocator.num_pages == 64
        if scheduler.prefix_tree is not None:
            assert any(probe.num_cached_tokens > 0 for probe in probes)
            scheduler.prefix_tree.evict(scheduler.prefix_tree.num_pages)
        assert scheduler.allocator.num_free == 64


def test_hits_are_whole_pages_of_all_but_the_last_token_for_any_number_of_ranks(
    thread_engines: ThreadEngines,
) -> None:
    """B17: never coarser than on one rank."""
    turns = [prompt_of(length, seed=1) for length in (5, 5, 17, 17, 33)]
    prompts = [tuple(itertools.chain.from_iterable(turns[: turn + 1])) for turn in range(len(turns))]
    for tp_size, dcp_size in ((1, 1), (2, 2), (4, 2), (4, 4), (8, 8)):
        with thread_engines.open(tp_size=tp_size, dcp_size=dcp_size, num_draft_tokens=1, page_size=4) as running:
            engine = running.engine()
            num_known = 0
            for prompt in prompts:
                first, again = (serve(engine, [Ask(prompt, greedy(2))])[0] for _ in range(2))
                # A page is known with the token behind it: the last prompt went on in another way.
                assert first.usage.num_cached_tokens == max(0, num_known - 1) // 4 * 4
                assert again.usage.num_cached_tokens == (len(prompt) - 1) // 4 * 4
                num_known = len(prompt)


@pytest.mark.parametrize("ranks", [(2, 2), (4, 2), (4, 4)])
def test_every_position_is_kept_by_one_rank_of_a_group_and_equals_that_of_one_rank(
    ranks: tuple[int, int], thread_engines: ThreadEngines
) -> None:
    """A4, A9, A20, B10: after drafts were refused, requests preempted and pages handed on."""
    asks = [Ask(prompt_of(length), drawn(length, 12)) for length in (23, 3, 14)]
    with thread_engines.open(
        tp_size=ranks[0], dcp_size=ranks[1], num_draft_tokens=3, num_pages=16 // ranks[1], max_model_len=48
    ) as running:
        running.poison()
        run = running.core_run()
        requests = [run.add(ask) for ask in asks]
        compared = 0
        with thread_engines.open(tp_size=1, dcp_size=1, num_draft_tokens=0, max_model_len=48) as alone:
            while run.step():
                for request in requests:
                    if request.slot is not None and run.core.slots.computed_S[request.slot] > 20:
                        compared += compare_latents(running, run, request.request_id, alone)
        assert compared > 3
        assert sum(request.num_preemptions for request in requests) > 0


def compare_latents(running: ThreadEngine, run: CoreRun, request_id: int, alone: ThreadEngine) -> int:
    """Compare all valid rows of a request, as all ranks hold them, with those of one pass on one rank."""
    request = run.requests[request_id]
    assert request.slot is not None
    num_rows = int(run.core.slots.computed_S[request.slot])
    page_ids = run.core.slots.page_ids(np.array([request.slot]))
    whole = CoreRun(
        alone.engine().checkpoint, ranks=alone.ranks, num_draft_tokens=0, max_model_len=48, prefill_chunk_tokens=64
    )
    again = whole.add(Ask(run.known_ids(request), greedy(2)))
    whole.step()
    whole_ids, size = whole.core.slots.page_ids(np.array([again.slot])), running.config.dcp_size
    for layer in range(2):
        expected_TX = latents_of(alone.workers[0], whole_ids, num_rows, layer=layer)
        shares = [latents_of(worker, page_ids, num_rows, layer=layer) for worker in running.workers]
        for group in range(0, len(shares), size):
            share_NTX = torch.stack(shares[group : group + size])
            num_owners_T = (share_NTX != 0).any(dim=-1).sum(dim=0)
            assert (num_owners_T == 1).all()
            torch.testing.assert_close(share_NTX.sum(dim=0), expected_TX, atol=1e-5, rtol=1e-4)
    whole.finish()
    return 1


def latents_of(worker: Worker, page_ids: np.ndarray, num_rows: int, *, layer: int) -> torch.Tensor:
    """What a rank holds of the first rows of a request, zeros where it owns none."""
    pool, position_T = worker.pool, np.arange(num_rows)
    metadata = build_metadata(
        geometry=pool.geometry,
        page_size=pool.layout.page_size,
        num_pages=pool.num_pages,
        request_index=np.zeros(num_rows, dtype=np.int64),
        position=position_T,
        page_table=page_ids,
    )
    return pool.gather_latent(layer, metadata.rows_of(torch.from_numpy(position_T)[:, None]))[:, 0]
