"""Prompts that begin alike share pages, target and draft KV together, and nothing but time changes."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.engine import Engine
from specdec.errors import RequestError
from specdec.result import GenerationResult
from tests.support.engines import Ask, Checkpoints, CoreRun, drawn, greedy, plain_logprobs, prompt_of, serve, tokens


def conversation(engine: Engine, *, num_turns: int, seed: int | None) -> list[GenerationResult]:
    """Turns of one conversation: each prompt holds all earlier prompts and outputs."""
    history: tuple[int, ...] = prompt_of(9)
    results = []
    for turn in range(num_turns):
        params = greedy(14) if seed is None else drawn(seed + turn, 14)
        (result,) = serve(engine, [Ask(history, params)])
        results.append(result)
        history += result.token_ids + prompt_of(3 + turn, seed=turn)
    return results


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_turns_of_a_conversation_reuse_pages_and_keep_output_and_acceptance(
    num_draft_tokens: int, page_size: int, seed: int | None, checkpoints: Checkpoints
) -> None:
    settings: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "page_size": page_size}
    warm = conversation(checkpoints.engine(**settings), num_turns=3, seed=seed)
    cold = conversation(checkpoints.engine(**settings, prefix_cache=False), num_turns=3, seed=seed)
    assert tokens(warm) == tokens(cold)
    assert [result.speculation for result in warm] == [result.speculation for result in cold]
    assert all(result.usage.num_cached_tokens == 0 for result in cold)
    for before, result in itertools.pairwise(warm):
        # All of the turn before but its last run, whose draft KV was not refreshed any more.
        known = len(before.prompt_token_ids) + len(before.token_ids)
        assert result.usage.num_cached_tokens % page_size == 0
        assert known - page_size - num_draft_tokens - 1 <= result.usage.num_cached_tokens < known


def test_repeated_prompt_reuses_all_but_its_last_token(checkpoints: Checkpoints) -> None:
    ask = Ask(prompt_of(9), greedy(6))
    engine = checkpoints.engine(page_size=4)
    first, second = serve(engine, [ask])[0], serve(engine, [ask])[0]
    assert (first.usage.num_cached_tokens, second.usage.num_cached_tokens) == (0, 8)
    assert second.token_ids == first.token_ids
    assert second.speculation == first.speculation


def test_draft_kv_of_reused_pages_equals_that_of_a_fresh_prefill(checkpoints: Checkpoints) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=3)
    run.poison()
    first = run.add(Ask(prompt_of(9), greedy(20)))
    (output,) = run.finish()
    second_prompt = first.prompt_ids.tolist() + list(output) + [1, 2, 3]
    second = run.add(Ask(tuple(second_prompt), greedy(20)))
    run.step_until_decoding(second)
    assert second.num_cached_tokens >= 24

    fresh_run = CoreRun(checkpoints.load(), num_draft_tokens=3)
    fresh = fresh_run.add(Ask(tuple(second_prompt), greedy(20)))
    fresh_run.step_until_decoding(fresh)
    for reused, computed in zip(run.draft_kv(second), fresh_run.draft_kv(fresh), strict=True):
        assert torch.equal(reused, computed)
    for reused, computed in zip(run.target_kv(second), fresh_run.target_kv(fresh), strict=True):
        assert torch.equal(reused, computed)


@pytest.mark.parametrize("page_size", [1, 4])
def test_page_is_not_shared_when_the_token_after_it_differs(page_size: int, checkpoints: Checkpoints) -> None:
    begin = prompt_of(2 * page_size)
    engine = checkpoints.engine(page_size=page_size)
    asks = [Ask((*begin, last), greedy(8)) for last in (5, 6, 5)]
    results = [serve(engine, [ask])[0] for ask in asks]
    assert [result.usage.num_cached_tokens for result in results] == [0, page_size, 2 * page_size]
    for ask, result in zip(asks, results, strict=True):
        (fresh,) = serve(checkpoints.engine(page_size=page_size), [ask])
        assert (result.token_ids, result.speculation) == (fresh.token_ids, fresh.speculation)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5])
def test_last_run_of_a_finished_request_is_not_shared(num_draft_tokens: int, checkpoints: Checkpoints) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=num_draft_tokens, page_size=1)
    first = run.add(Ask(prompt_of(6), greedy(15)))
    (output,) = run.finish()
    num_known_before_last_run = 6 + 15 - len(run.updates[0][-1].token_ids)
    second = run.add(Ask((*first.prompt_ids.tolist(), *output, 9), greedy(4)))
    run.finish()
    # Before its last run, every known token but the last had its KV, refreshed.
    assert second.num_cached_tokens == num_known_before_last_run - 1


def test_choices_and_prompts_that_run_together_do_not_disturb_each_other(checkpoints: Checkpoints) -> None:
    prompt = prompt_of(13)
    engine = checkpoints.engine(num_draft_tokens=3)
    params = drawn(5, 12, n=4)
    cold = [choice.token_ids for choice in engine.generate([prompt], params)[0].choices]
    warm = [choice.token_ids for choice in engine.generate([prompt], params)[0].choices]
    assert len(set(cold)) == 4
    assert warm == cold
    asks = [Ask((*prompt, last), drawn(last, 12)) for last in range(6)]
    assert tokens(serve(engine, asks)) == [checkpoints.plain(ask) for ask in asks]


def test_prompt_logprobs_are_computed_without_a_hit(checkpoints: Checkpoints) -> None:
    prompt = prompt_of(13)
    engine = checkpoints.engine(num_draft_tokens=3, prefill_chunk_tokens=5)
    serve(engine, [Ask(prompt, greedy(4))])
    (result,) = serve(engine, [Ask(prompt, greedy(4, prompt_logprobs=2))])
    assert result.usage.num_cached_tokens == 0
    assert result.prompt_logprobs is not None
    assert [entry.token_id for entry in result.prompt_logprobs] == list(prompt[1:])
    assert [entry.raw_logprob for entry in result.prompt_logprobs] == plain_logprobs(checkpoints.load(), prompt)
    # The pages it computed serve others.
    (after,) = serve(engine, [Ask((*prompt, 1), greedy(4))])
    assert after.usage.num_cached_tokens == 12


def test_a_salt_keeps_pages_to_those_who_give_it(checkpoints: Checkpoints) -> None:
    """Nobody else finds out what was asked, and the answer is the same for all."""
    engine = checkpoints.engine(page_size=4)
    prompt, params = prompt_of(13), greedy(6)
    expected = checkpoints.plain(Ask(prompt, params))
    hits = []
    for salt in ("one", "another", None, "one", "another", None, "One"):
        (result,) = engine.generate(prompt, params, cache_salt=salt)
        assert result.token_ids == expected
        hits.append(result.usage.num_cached_tokens)
    assert hits == [0, 0, 0, 12, 12, 12, 0]
    with engine.stream((*prompt, 1), params, cache_salt="another") as stream:
        assert stream.result().usage.num_cached_tokens == 12
    wrong: Any
    for wrong in ("", b"one", 1):
        with pytest.raises(RequestError, match="cache_salt must be a text") as caught:
            engine.generate(prompt, params, cache_salt=wrong)
        assert caught.value.parameter == "cache_salt"


def test_no_page_is_kept_when_the_prefix_cache_is_off(checkpoints: Checkpoints) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=3, prefix_cache=False)
    for _ in range(2):
        request = run.add(Ask(prompt_of(13), greedy(9)))
        run.finish()
        assert request.num_cached_tokens == 0
    assert run.core.scheduler.prefix_tree is None
    assert run.core.scheduler.allocator.num_free == run.core.scheduler.allocator.num_pages


@pytest.mark.parametrize("num_pages", [12, 20])
def test_probe_gives_the_same_output_while_others_evict_its_pages(num_pages: int, checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3, num_pages=num_pages, max_model_len=48, max_num_requests=4)
    probe = Ask(prompt_of(17), drawn(1, 9))
    expected = checkpoints.plain(probe)
    cached: set[int] = set()
    for index in range(8):
        (result,) = serve(engine, [probe])
        assert result.token_ids == expected
        cached.add(result.usage.num_cached_tokens)
        serve(engine, others(index))
        assert engine.kv_pages() == (num_pages, num_pages)
    assert 0 in cached  # its pages were evicted in between


def others(index: int) -> Sequence[Ask]:
    return [Ask(prompt_of(5 + 7 * i, seed=10 * index + i), greedy(6)) for i in range(1 + index % 5)]


def test_choices_of_one_prompt_share_its_pages(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(page_size=4, max_num_requests=4, prefill_chunk_tokens=16)
    prompt = prompt_of(41)
    apart = [
        checkpoints.engine(page_size=4, prefix_cache=False).generate(prompt, drawn(5, 6, n=n)).pop().choices[n - 1]
        for n in (1, 2, 3)
    ]
    together = engine.generate(prompt, drawn(5, 6, n=3))[0]
    assert [choice.token_ids for choice in together.choices] == [choice.token_ids for choice in apart]
    with engine.stream(prompt_of(41, seed=1), drawn(5, 6, n=3)) as stream:
        slots = engine.core.slots
        while slots.num_active < 3:
            assert engine.step()
        first, second, third = (slots.pages(slot)[:10] for slot in range(3))
        assert first == second == third
        assert len(stream.result().choices) == 3


def test_choices_that_share_all_their_pages_start_together(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(page_size=4, max_num_requests=8)
    with engine.stream(prompt_of(9), drawn(5, 6, n=8)) as stream:
        engine.step()  # the first choice computes the prompt
        engine.step()  # the others take its pages
        assert engine.core.slots.num_active == 8
        assert len(stream.result().choices) == 8
