"""A prompt computed in pieces leaves the same draft KV, the same first drafts and the same output as in one piece."""

from typing import Any

import pytest
import torch

from specdec.models.glm.mtp import MtpIndexSharing
from specdec.request import Request
from tests.support.engines import Ask, Checkpoints, CoreRun, RecordedDrafts, drawn, greedy, prompt_of, serve, tokens

NUM_DRAFT_TOKENS = 3


def assert_same_draft_state(run: CoreRun, request: Request, whole_run: CoreRun, whole: Request) -> None:
    """Same draft KV, row by row and bit by bit, and the same state for the next drafts."""
    assert run.known_ids(request) == whole_run.known_ids(whole)
    for part, all_at_once in zip(run.draft_kv(request), whole_run.draft_kv(whole), strict=True):
        assert part.isfinite().all()
        assert torch.equal(part, all_at_once)
    draft, whole_draft = run.mtp_draft, whole_run.mtp_draft
    assert torch.equal(draft.g_SH[request.slot], whole_draft.g_SH[whole.slot])
    assert torch.equal(draft.anchor_SX[request.slot], whole_draft.anchor_SX[whole.slot])


def prefilled(checkpoints: Checkpoints, prompt: tuple[int, ...], **settings: Any) -> tuple[CoreRun, Request]:
    """A request that has just drawn its first token."""
    run = CoreRun(checkpoints.load(), num_draft_tokens=NUM_DRAFT_TOKENS, **settings)
    run.poison()
    request = run.add(Ask(prompt, greedy(16)))
    run.step_until_decoding(request)
    return run, request


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("chunk", [1, 2, 7, 36])
def test_draft_kv_of_a_prompt_in_chunks_equals_that_of_one_pass(
    chunk: int, page_size: int, checkpoints: Checkpoints
) -> None:
    prompt = prompt_of(37)
    run, request = prefilled(checkpoints, prompt, prefill_chunk_tokens=chunk, page_size=page_size)
    whole_run, whole = prefilled(checkpoints, prompt, prefill_chunk_tokens=512)
    assert_same_draft_state(run, request, whole_run, whole)


@pytest.mark.parametrize("sharing", list(MtpIndexSharing))
def test_first_drafts_after_chunks_equal_those_after_one_pass(
    sharing: MtpIndexSharing, checkpoints: Checkpoints
) -> None:
    drafts = []
    for chunk in (1, 5, 512):
        run = CoreRun(
            checkpoints.load(),
            num_draft_tokens=5,
            prefill_chunk_tokens=chunk,
            mtp_index_sharing=sharing,
        )
        recorded = RecordedDrafts.of(run)
        run.step_until_decoding(run.add(Ask(prompt_of(23), greedy(8))))
        run.step()
        drafts.append(recorded.token_ids)
    assert len(drafts[0]) == 1
    assert drafts[0] == drafts[1] == drafts[2]


@pytest.mark.parametrize("neighbour_length", [1, 30])
def test_draft_kv_does_not_depend_on_prompts_that_share_the_chunks(
    neighbour_length: int, checkpoints: Checkpoints
) -> None:
    prompt = prompt_of(20)
    run = CoreRun(checkpoints.load(), num_draft_tokens=NUM_DRAFT_TOKENS, prefill_chunk_tokens=7)
    run.poison()
    run.add(Ask(prompt_of(neighbour_length, seed=1), greedy(30)))
    request = run.add(Ask(prompt, greedy(16)))
    run.add(Ask(prompt_of(neighbour_length, seed=2), greedy(30)))
    run.step_until_decoding(request)
    whole_run, whole = prefilled(checkpoints, prompt, prefill_chunk_tokens=512)
    assert_same_draft_state(run, request, whole_run, whole)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_draft_kv_of_a_preempted_request_equals_that_of_one_pass_over_its_known_tokens(
    chunk: int, prefix_cache: bool, checkpoints: Checkpoints
) -> None:
    run, request = prefilled(checkpoints, prompt_of(13), prefill_chunk_tokens=chunk, prefix_cache=prefix_cache)
    for _ in range(4):
        run.step()
    known_ids = run.known_ids(request)
    assert request.slot is not None
    run.core.scheduler.preempt(request.slot)
    if not prefix_cache:
        run.poison()
    run.step_until_decoding(request)
    whole_run, whole = prefilled(checkpoints, known_ids, prefill_chunk_tokens=512)
    assert_same_draft_state(run, request, whole_run, whole)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5])
def test_prompts_shorter_than_a_verify_step_are_not_taken_for_decodes(
    num_draft_tokens: int, checkpoints: Checkpoints
) -> None:
    asks = [Ask(prompt_of(length), greedy(9)) for length in range(1, num_draft_tokens + 4)]
    expected = [checkpoints.plain(ask) for ask in asks]
    for ask, output in zip(asks, expected, strict=True):
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens)
        assert tokens(serve(engine, [ask])) == [output]

    # Beside a running decode, and while a long prompt is being computed in chunks.
    decode, long_prompt = Ask(prompt_of(3, seed=1), drawn(5, 30)), Ask(prompt_of(60, seed=2), greedy(5))
    engine = checkpoints.engine(num_draft_tokens=num_draft_tokens, prefill_chunk_tokens=8, prefix_cache=False)
    with engine.stream(decode.prompt, decode.params) as running, engine.stream(long_prompt.prompt, greedy(5)) as late:
        next(iter(running))
        assert tokens(serve(engine, asks)) == expected
        assert late.result().token_ids == checkpoints.plain(long_prompt)
        assert running.result().token_ids == checkpoints.plain(decode)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_last_chunks_shorter_than_a_verify_step_are_not_taken_for_decodes(
    num_draft_tokens: int, checkpoints: Checkpoints
) -> None:
    chunk = 8
    asks = [Ask(prompt_of(2 * chunk + rest), greedy(8)) for rest in range(1, num_draft_tokens + 2)]
    for ask in asks:
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens, prefill_chunk_tokens=chunk)
        assert tokens(serve(engine, [ask])) == [checkpoints.plain(ask)]
