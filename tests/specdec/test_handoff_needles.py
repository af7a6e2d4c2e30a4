"""The shipped checkpoint finds a line far beyond the index selection in a prompt that a layer split has computed.

The tag B14 is explained in `tests/INVARIANTS.md`.
"""

import pytest

from specdec.engine import Engine
from specdec.models.glm.released import locate_checkpoint
from tests.support.engines import Ask, greedy, serve, tokens
from tests.support.first_difference import assert_equal_but_for_narrow_choices
from tests.support.handoff import serving
from tests.support.needles import needles
from tests.support.thread_engine import ThreadEngines

SETTINGS = {"page_size": 64, "max_model_len": 2048, "max_num_requests": 4, "prefill_chunk_tokens": 512}


@pytest.mark.parametrize(
    "depth", [pytest.param(0.1, marks=pytest.mark.full), 0.5, pytest.param(0.9, marks=pytest.mark.full)]
)
def test_a_line_far_beyond_the_index_selection_is_found_after_a_hand_off(
    depth: float, thread_engines: ThreadEngines
) -> None:
    """B14: layers split over two ranks become pages spread over two; equal to one engine and right."""
    model = locate_checkpoint("glm-tiny")
    one_rank = Engine.from_pretrained("glm-tiny", num_draft_tokens=0, **SETTINGS)
    prompts, answers = needles(one_rank, depth=depth, num_prompts=3)
    asks = [Ask(tuple(prompt), greedy(24)) for prompt in prompts]
    assert min(map(len, prompts)) > 2 * one_rank.checkpoint.config.index_topk
    expected = tokens(serve(one_rank, asks))
    with (
        thread_engines.open(
            model,
            tp_size=1,
            dcp_size=1,
            cp_size=2,
            num_draft_tokens=0,
            with_draft=True,
            transport="local",
            **SETTINGS,
        ) as prefill,
        serving(prefill.engine()) as server,
        thread_engines.open(
            model,
            tp_size=2,
            dcp_size=2,
            num_draft_tokens=3,
            transport="local",
            prefill=(server.address,),
            **SETTINGS,
        ) as decode,
    ):
        prefill.poison()
        decode.poison()
        engine = decode.engine()
        results = serve(engine, asks)
        assert engine.intake is not None
        assert engine.intake.counts.num_received == len(asks)
        engine.close()
    found = tokens(results)
    assert all(result.speculation.num_accepted_tokens for result in results)
    assert one_rank.tokenizer is not None
    texts = [one_rank.tokenizer.decode(list(token_ids), skip_special_tokens=True) for token_ids in found]
    assert sum(answer in text for answer, text in zip(answers, texts, strict=True)) >= 2
    assert_equal_but_for_narrow_choices(one_rank.checkpoint, asks, found, expected)
