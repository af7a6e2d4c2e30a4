"""Ranks of a layer split as processes over gloo: what they generate, and what they hand over, draft KV included.

`test_layer_split_prefill` has the matrix, over threads.
"""

import itertools

from specdec.engine import Engine
from tests.support.engines import Checkpoints, serve, tokens
from tests.support.handoff import serving
from tests.support.matrix import asks_of

SETTINGS = {"page_size": 4, "max_model_len": 128, "max_num_requests": 8, "num_pages": 64}


def test_processes_of_a_layer_split_give_what_one_rank_gives(checkpoints: Checkpoints) -> None:
    """B60, B61."""
    directory = checkpoints.path("parallel")
    asks = asks_of("both", num_drafts=0, lengths=[1, 3, 4, 5, 16, 17, 33, 40], logprobs=0)
    with Engine.from_pretrained(directory, num_draft_tokens=2, **SETTINGS) as one:
        expected = serve(one, asks)
    with Engine.from_pretrained(
        directory,
        num_draft_tokens=0,
        draft_kv=True,
        cp_size=3,  # two layers: the last rank stores the draft's alone
        prefill_chunk_tokens=16,
        transport="local",
        **SETTINGS,
    ) as engine:
        engine.record_collectives(True)
        results = serve(engine, asks)
        collectives = engine.record_collectives(False)
        with (
            serving(engine) as server,
            Engine.from_pretrained(directory, num_draft_tokens=2, prefill=[server.address], **SETTINGS) as decode,
        ):
            received = serve(decode, asks)
        assert engine.kv_pages()[0] == engine.kv_pages()[1]
    for found in (results, received):
        assert tokens(found) == tokens(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.choices[0].logprobs == theirs.choices[0].logprobs
    assert [each.speculation for each in received] == [each.speculation for each in expected]
    assert {each.group for each in collectives[0]} == {"cp"}
    assert {each.kind for each in collectives[0]} == {"all_gather", "broadcast"}
    assert all([each[:2] for each in a] == [each[:2] for each in b] for a, b in itertools.pairwise(collectives))
