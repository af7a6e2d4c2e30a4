"""At the context limit drafts are cut to what still fits, and the output ends exactly there."""

import pytest

from specdec.drafting.draft import DraftSource
from specdec.drafting.scripted_draft import ScriptedDraft, random_draft
from specdec.errors import RequestError
from tests.support.engines import VOCAB_SIZE, Ask, Checkpoints, CoreRun, greedy, prompt_of, script_of, serve

LIMIT = 32


@pytest.mark.parametrize("draft", ["mtp", "oracle", "random"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 5, 7])
def test_output_fills_the_context_and_no_more(
    num_draft_tokens: int, page_size: int, draft: str, checkpoints: Checkpoints
) -> None:
    asks = [Ask(prompt_of(length), greedy(64, seed=length)) for length in range(LIMIT - 8, LIMIT)]
    longer = [checkpoints.plain(Ask(ask.prompt, greedy(16))) for ask in asks]  # the oracle would draft past the limit
    expected = [output[: LIMIT - len(ask.prompt)] for ask, output in zip(asks, longer, strict=True)]
    source: DraftSource | None = None
    if draft == "oracle":
        source = ScriptedDraft(script_of(asks, longer), vocab_size=VOCAB_SIZE)
    elif draft == "random":
        source = random_draft(vocab_size=VOCAB_SIZE, seed=0)
    engine = checkpoints.engine(
        draft_source=source,
        num_draft_tokens=num_draft_tokens,
        page_size=page_size,
        max_model_len=LIMIT,
        num_pages=3 * LIMIT // page_size,
    )
    pages = engine.kv_pages()
    for results in (serve(engine, asks), [*serve(engine, asks[:1]), *serve(engine, asks[1:])]):
        for result, output in zip(results, expected, strict=True):
            assert result.token_ids == output
            assert result.finish_reason == "length"
    assert engine.kv_pages() == pages == (3 * LIMIT // page_size, 3 * LIMIT // page_size)


def test_prompt_without_room_for_a_token_is_refused(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3, max_model_len=LIMIT)
    for length in (LIMIT, LIMIT + 1, 5 * LIMIT):
        with pytest.raises(RequestError, match=rf"{length} tokens.*at most {LIMIT - 1}"):
            serve(engine, [Ask(prompt_of(length), greedy(1))])
    assert engine.kv_pages()[0] == engine.kv_pages()[1]


def test_speculation_uses_the_last_rows_of_the_checkpoint_s_own_limit(checkpoints: Checkpoints) -> None:
    limit = checkpoints.load().config.max_position_embeddings
    ask = Ask(prompt_of(limit - 6), greedy(64))
    expected = checkpoints.plain(ask, max_model_len=limit)
    assert len(expected) == 6
    engine = checkpoints.engine(num_draft_tokens=5, max_model_len=None)
    assert engine.max_model_len == limit
    assert serve(engine, [ask])[0].token_ids == expected


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_drafts_are_never_more_than_the_output_has_room_for(max_tokens: int, checkpoints: Checkpoints) -> None:
    ask = Ask(prompt_of(5), greedy(max_tokens))
    source = ScriptedDraft(script_of([ask], [checkpoints.plain(Ask(ask.prompt, greedy(20)))]), vocab_size=VOCAB_SIZE)
    run = CoreRun(checkpoints.load(), num_draft_tokens=5, draft_source=source)
    request = run.add(ask)
    run.finish()
    # The first token comes with the prompt; the last of a run is the target's own, not a draft.
    assert request.speculation.num_draft_tokens == max(0, max_tokens - 2)
    assert request.speculation.num_accepted_tokens == max(0, max_tokens - 2)
