"""Ranks as processes over gloo give what one rank gives.

A group takes a while to start: there are few of them, with many cases in each.

`test_dcp_exactness` has the matrix, over threads. Tags such as B60 are explained in `tests/INVARIANTS.md`.
"""

import itertools

import pytest

from specdec.dcp.exchange import ExchangeStrategy
from specdec.engine import Engine
from specdec.models.glm.expert_split import ExpertSplit
from tests.support.engines import Ask, Checkpoints, drawn, greedy, prompt_of, serve, tokens
from tests.support.matrix import asks_of

PAGE_SIZE = 4
SETTINGS = {"page_size": PAGE_SIZE, "max_model_len": 128, "max_num_requests": 8, "num_pages": 32}


@pytest.mark.parametrize(
    ("sizes", "ways", "num_draft_tokens"),
    [
        pytest.param((2, 2), (ExpertSplit.SLICE, ExchangeStrategy.PACKED), 3, marks=pytest.mark.full),
        ((4, 2), (ExpertSplit.EXPERT, ExchangeStrategy.GATHER_SCATTER), 5),
        ((8, 8), (ExpertSplit.EXPERT, ExchangeStrategy.PACKED), 1),
    ],
)
def test_processes_give_what_one_rank_gives(
    sizes: tuple[int, int],
    ways: tuple[ExpertSplit, ExchangeStrategy],
    num_draft_tokens: int,
    checkpoints: Checkpoints,
) -> None:
    """B60: and take part in the same collectives; tokens, acceptance, log-probabilities, prefix hits."""
    (tp_size, dcp_size), (expert_split, exchange) = sizes, ways
    run = PAGE_SIZE * dcp_size
    borders = [1, run - 1, run, run + 1, 2 * run + 1, PAGE_SIZE, PAGE_SIZE + 1, 40]
    batches = [
        asks_of("both", num_drafts=num_draft_tokens, lengths=borders, logprobs=0),
        [Ask(prompt_of(length), greedy(4, logprobs=0)) for length in range(1, run + 2)],
        [Ask((*prompt_of(borders[4]), last), drawn(last, 9, logprobs=0)) for last in range(4)],
        asks_of("one", num_drafts=num_draft_tokens, lengths=borders, logprobs=0),  # the first one's prompts again
    ]
    directory = checkpoints.path("parallel")
    one_rank = Engine.from_pretrained(directory, num_draft_tokens=num_draft_tokens, **SETTINGS)
    expected = [serve(one_rank, batch) for batch in batches]
    plain = Engine.from_pretrained(directory, num_draft_tokens=0, **SETTINGS)
    with Engine.from_pretrained(
        directory,
        num_draft_tokens=num_draft_tokens,
        tp_size=tp_size,
        dcp_size=dcp_size,
        expert_split=expert_split,
        exchange=exchange,
        **{**SETTINGS, "num_pages": -(-SETTINGS["num_pages"] // dcp_size)},
    ) as engine:
        engine.record_collectives(True)
        results = [serve(engine, batch) for batch in batches]
        collectives = engine.record_collectives(False)
        assert engine.kv_pages() == (32, 32)
    for batch, found, right in zip(batches, results, expected, strict=True):
        assert tokens(found) == tokens(right) == tokens(serve(plain, batch))
        assert [each.speculation for each in found] == [each.speculation for each in right]
        assert [each.usage.num_cached_tokens for each in found] == [each.usage.num_cached_tokens for each in right]
        for ours, theirs in zip(found, right, strict=True):
            entries = zip(ours.choices[0].logprobs or (), theirs.choices[0].logprobs or (), strict=True)
            assert all(abs(mine.raw_logprob - other.raw_logprob) < 1e-4 for mine, other in entries)
    assert len(collectives) == tp_size
    assert collectives[0]
    assert all(mine == other for mine, other in itertools.pairwise(collectives))
