"""A prompt computed by a prefill gives what it gives where it is computed: tokens, log-probabilities, drafts.

Every geometry of the prefill meets every geometry of the decode group, and bytes go as whole pages or packed, through a
buffer that is far smaller than a prompt. Ranks are threads here, transports are real;
`test_handoff_processes` has the same between processes. Tags such as B32 are explained in `tests/INVARIANTS.md`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from specdec.dcp.layout import KvFormat
from specdec.engine import Engine
from specdec.ranks import rank_setup
from specdec.request import Request
from specdec.result import GenerationResult
from tests.support.engines import Ask, Checkpoints, drawn, greedy, kv_settings, prompt_of, serve, tokens
from tests.support.first_difference import assert_equal_but_for_narrow_choices, logprob_distance
from tests.support.handoff import serving
from tests.support.matrix import name_of
from tests.support.packed_transfer import PackedTransfer
from tests.support.pairwise import Row, all_rows, pairwise_rows
from tests.support.thread_engine import ThreadEngines
from tests.support.transfer_peer import open_or_skip

MOST_LOGPROB_DISTANCE = 1e-4
LOOSE_LOGPROB_DISTANCE = 1.0  # where a rounded cache entry may fall to the other side
SOURCES: Mapping[str, Mapping[str, int]] = {
    "one rank": {},
    "tp 2": {"tp_size": 2},
    "dcp 2": {"tp_size": 2, "dcp_size": 2},
    "dcp 4": {"tp_size": 4, "dcp_size": 4},
    "tp 4 dcp 2": {"tp_size": 4, "dcp_size": 2},
    "cp 2": {"cp_size": 2},
    "cp 4": {"cp_size": 4},
    "cp 8": {"cp_size": 8},
}
DESTINATIONS: Mapping[str, Mapping[str, int]] = {
    "one rank": {},
    "tp 2": {"tp_size": 2},
    "dcp 2": {"tp_size": 2, "dcp_size": 2},
    "dcp 4": {"tp_size": 4, "dcp_size": 4},
    "tp 4 dcp 2": {"tp_size": 4, "dcp_size": 2},
}
AXES: Mapping[str, Sequence[Any]] = {
    "source": tuple(SOURCES),
    "destination": tuple(DESTINATIONS),
    "transport": ("local", "mooncake", "nixl"),
    "page_size": (1, 4),
    "chunk": (5, 16, 64),
    "num_draft_tokens": (0, 3),
    "kv_format": (None, None, KvFormat.FP8, KvFormat.FP8_PACKED),
    "prefixes": ("off", "warm"),
    "sending": ("pages", "packed"),
}
FULL_AXES = {**AXES, "chunk": (16,), "num_draft_tokens": (3,), "kv_format": (None,), "prefixes": ("warm",)}


@pytest.mark.parametrize("row", pairwise_rows(AXES, seed=4), ids=name_of)
def test_prompts_of_a_prefill_give_what_they_give_where_they_are_computed(
    row: Row, checkpoints: Checkpoints, thread_engines: ThreadEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(row, checkpoints, thread_engines, monkeypatch)


def test_sample_holds_every_pair_of_values() -> None:
    rows = pairwise_rows(AXES, seed=4)
    for first, second in itertools.combinations(AXES, 2):
        found = {(row[first], row[second]) for row in rows}
        assert found == set(itertools.product(AXES[first], AXES[second]))


@pytest.mark.full
@pytest.mark.parametrize("row", list(all_rows(FULL_AXES)), ids=name_of)
def test_every_combination_of_geometries_and_transports(
    row: Row, checkpoints: Checkpoints, thread_engines: ThreadEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(row, checkpoints, thread_engines, monkeypatch)


def check(row: Row, checkpoints: Checkpoints, thread_engines: ThreadEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    open_or_skip(row["transport"]).close()
    if row["sending"] == "packed":
        monkeypatch.setattr(rank_setup, "RankTransfer", PackedTransfer)
    source, destination = SOURCES[row["source"]], DESTINATIONS[row["destination"]]
    asks = asks_of(row["page_size"], row["chunk"], dcp_size=destination.get("dcp_size", 1))
    num_drafts = row["num_draft_tokens"]
    shared = {"page_size": row["page_size"], "max_num_requests": 4, **kv_settings(row["kv_format"])}
    with (
        opened(
            thread_engines,
            source,
            num_draft_tokens=0,
            with_draft=num_drafts > 0,
            prefill_chunk_tokens=row["chunk"],
            transport=row["transport"],
            prefix_cache=row["prefixes"] != "off",
            **shared,
        ) as prefill,
        serving(prefill.engine()) as server,
        opened(
            thread_engines,
            destination,
            num_draft_tokens=num_drafts,
            prefill=(server.address,),
            transport=row["transport"],
            prefix_cache=row["prefixes"] != "off",
            **shared,
        ) as decode,
    ):
        prefill.poison()
        decode.poison()
        engine = decode.engine()
        earlier: list[tuple[int, ...]] = [()] * len(asks)
        if row["prefixes"] == "warm":
            halves = [Ask(ask.prompt[: (len(ask.prompt) + 1) // 2], ask.params) for ask in asks]
            outputs = tokens(serve(engine, halves))
            earlier = [half.prompt + output for half, output in zip(halves, outputs, strict=True)]
        num_cached = prefixes_of(engine)
        results = serve(engine, asks)
        kept = [whole_pages(*pair, page_size=row["page_size"]) for pair in zip(asks, earlier, strict=True)]
        assert any(kept) is (row["prefixes"] == "warm")
        assert [num_cached[ask.prompt] for ask in asks] == kept
        assert [result.usage.num_cached_tokens for result in results] == kept
        assert engine.kv_pages()[0] == engine.kv_pages()[1]
        assert engine.intake is not None
        assert engine.intake.counts.num_lost == 0
        engine.close()
        if row["sending"] == "packed":
            senders: list[Any] = [worker.transfer for worker in prefill.workers]
            assert sum(sender.num_packed for sender in senders) > len(asks)
            assert [sender.sending.reclaim() for sender in senders] == [0] * len(senders)
    compare(results, asks, checkpoints, thread_engines, destination, num_drafts=num_drafts, **shared)


def compare(
    results: Sequence[GenerationResult],
    asks: Sequence[Ask],
    checkpoints: Checkpoints,
    thread_engines: ThreadEngines,
    destination: Mapping[str, int],
    *,
    num_drafts: int,
    **settings: Any,
) -> None:
    """Compare with decoding without drafts on the ranks of the decode group, prompts computed there."""
    settings.pop("max_num_requests")
    plain = thread_engines.plain(asks, **{"tp_size": 1, "dcp_size": 1, **destination}, **settings)
    is_exact = settings["kv_format"] is None
    if is_exact:
        checkpoint = checkpoints.load("parallel")
        assert_equal_but_for_narrow_choices(checkpoint, asks, tokens(results), tokens(plain))
    assert logprob_distance(results, plain) < (MOST_LOGPROB_DISTANCE if is_exact else LOOSE_LOGPROB_DISTANCE)
    if is_exact and num_drafts:
        with opened(thread_engines, destination, num_draft_tokens=num_drafts, **settings) as alone:
            expected = serve(alone.engine(), asks)
        # B32: already the first draft is that of an engine that computed the prompt itself.
        assert [each.speculation for each in results] == [each.speculation for each in expected]


def prefixes_of(engine: Engine) -> dict[tuple[int, ...], int]:
    """Collects, by prompt, the leading tokens that the decode group has itself when it asks for the rest."""
    num_cached_of: dict[tuple[int, ...], int] = {}
    intake: Any = engine.intake
    start = intake.start

    def started(request: Request, *, num_cached: int, **others: Any) -> None:
        num_cached_of[tuple(request.prompt_ids.tolist())] = num_cached
        start(request, num_cached=num_cached, **others)

    intake.start = started
    return num_cached_of


def whole_pages(ask: Ask, earlier: Sequence[int], *, page_size: int) -> int:
    """Leading tokens of a prompt in the pages that it shares with an earlier text.

    A page is shared only where the token behind it is equal too: the draft's last row is made of that.
    """
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ask.prompt, earlier, strict=False))
    return max(len(list(equal)) - 1, 0) // page_size * page_size


def asks_of(page_size: int, chunk: int, *, dcp_size: int) -> list[Ask]:
    """O17: prompts that end around the borders of pages, of turns round the ranks, and of chunks."""
    borders = {1, page_size, dcp_size * page_size, chunk, 2 * chunk}
    lengths = sorted({n + d for n in borders for d in (-1, 0, 1) if 1 <= n + d <= 110} - {2 * chunk - 1})
    return [
        Ask(prompt_of(length, seed=length % 3), greedy(6, logprobs=0) if length % 2 else drawn(length, 6, logprobs=0))
        for length in lengths
    ]


def opened(thread_engines: ThreadEngines, sizes: Mapping[str, int], **settings: Any) -> Any:
    return thread_engines.open("parallel", **{"tp_size": 1, "dcp_size": 1, **sizes}, **settings)
