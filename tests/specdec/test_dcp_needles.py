"""The shipped checkpoint finds a line far beyond the index selection, however many ranks share its page.

The tag B14 is explained in `tests/INVARIANTS.md`.
"""

import pytest

from specdec.engine import Engine
from specdec.models.glm.released import locate_checkpoint
from tests.support.engines import Ask, greedy, serve, tokens
from tests.support.first_difference import assert_equal_but_for_narrow_choices
from tests.support.needles import needles
from tests.support.thread_engine import ThreadEngines

SETTINGS = {"page_size": 64, "max_model_len": 2048, "max_num_requests": 4, "prefill_chunk_tokens": 1024}


@pytest.fixture(scope="module")
def one_rank() -> Engine:
    return Engine.from_pretrained("glm-tiny", num_draft_tokens=0, **SETTINGS)


@pytest.mark.parametrize(
    ("dcp_size", "num_draft_tokens", "depth"),
    [
        pytest.param(dcp_size, num_drafts, depth, marks=[] if (dcp_size, num_drafts, depth) == (2, 3, 0.5) else full)
        for full in [pytest.mark.full]
        for dcp_size in (2, 4)
        for num_drafts in (0, 3)
        for depth in (0.1, 0.5, 0.9)
    ],
)
def test_a_line_far_beyond_the_index_selection_is_found_by_ranks_that_share_it(
    dcp_size: int, num_draft_tokens: int, depth: float, one_rank: Engine, thread_engines: ThreadEngines
) -> None:
    """B14: page 64, the only size of GPUs; prompts of several pages a rank; equal to one rank and right."""
    prompts, answers = needles(one_rank, depth=depth, num_prompts=3)
    asks = [Ask(tuple(prompt), greedy(24)) for prompt in prompts]
    assert min(map(len, prompts)) > 2 * one_rank.checkpoint.config.index_topk
    expected = tokens(serve(one_rank, asks))
    with thread_engines.open(
        locate_checkpoint("glm-tiny"),
        tp_size=dcp_size,
        dcp_size=dcp_size,
        num_draft_tokens=num_draft_tokens,
        **SETTINGS,
    ) as running:
        found = tokens(serve(running.engine(), asks))
    assert one_rank.tokenizer is not None
    texts = [one_rank.tokenizer.decode(list(token_ids), skip_special_tokens=True) for token_ids in found]
    assert sum(answer in text for answer, text in zip(answers, texts, strict=True)) >= 2
    assert_equal_but_for_narrow_choices(one_rank.checkpoint, asks, found, expected)
