"""Ranks change nothing: outputs are those of plain decoding on the same ranks, and those of one rank.

Speculation on and off give equal tokens on the same ranks in every number format. Between numbers of ranks partial sums
are added in another order, so float32 alone promises equal tokens, up to choices that hang on rounding; in the other
formats a rounded cache entry may fall to the other side.

Ranks are threads here; `test_rank_processes` has the same over processes. Tags such as A4 are explained in
`tests/INVARIANTS.md`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from specdec.dcp.exchange import ExchangeStrategy
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.mtp import MtpIndexSharing
from specdec.result import GenerationResult
from specdec.sampling.accept import AcceptanceRule
from tests.support.engines import VOCAB_SIZE, Ask, Checkpoints, drawn, greedy, kv_settings, prompt_of, serve, tokens
from tests.support.first_difference import assert_equal_but_for_narrow_choices, first_difference, logprob_distance
from tests.support.matrix import NUMBERS, asks_of, name_of, source_of
from tests.support.pairwise import Row, all_rows, pairwise_rows
from tests.support.thread_engine import ThreadEngines

GEOMETRIES = ((2, 1), (2, 2), (4, 2), (4, 4), (8, 8))
ONE_RANK = {"tp_size": 1, "dcp_size": 1}
MOST_LOGPROB_DISTANCE = 1e-4
# What other number formats may differ by between geometries: a cache entry that is rounded to the other side.
LOOSE_LOGPROB_DISTANCE = 1.0
LONGEST_PROMPT = 137

AXES: Mapping[str, Sequence[Any]] = {
    "ranks": GEOMETRIES,
    "num_draft_tokens": (0, 1, 3, 5),
    "draft": (*MtpIndexSharing, "oracle", "first wrong", "last wrong", "random"),
    "numbers": tuple(NUMBERS),
    "page_size": (1, 4),
    "prefill_chunk_tokens": (5, 64),
    "memory": ("ample", "one request"),
    "prefixes": ("off", "cold", "warm"),
    "temperature": ("zero", "one", "both"),
    "exchange": tuple(ExchangeStrategy),
    "expert_split": tuple(ExpertSplit),
}
FULL_AXES: Mapping[str, Sequence[Any]] = {
    **AXES,
    "num_draft_tokens": (1, 3, 5),
    "draft": (MtpIndexSharing.ANCHOR, "last wrong", "random"),
    "prefill_chunk_tokens": (5,),
    "memory": ("one request",),
    "prefixes": ("warm",),
    "temperature": ("both",),
    "exchange": (ExchangeStrategy.PACKED,),  # the other gives the same bits: test_exchange
    "expert_split": (ExpertSplit.EXPERT,),
}


@pytest.mark.parametrize("row", pairwise_rows(AXES, seed=3), ids=name_of)
def test_ranks_and_settings_give_the_plain_output(
    row: Row, checkpoints: Checkpoints, thread_engines: ThreadEngines
) -> None:
    check(row, checkpoints, thread_engines)


def test_sample_holds_every_pair_of_values() -> None:
    rows = pairwise_rows(AXES, seed=3)
    for first, second in itertools.combinations(AXES, 2):
        found = {(row[first], row[second]) for row in rows}
        assert found == set(itertools.product(AXES[first], AXES[second]))


@pytest.mark.full
@pytest.mark.parametrize("row", list(all_rows(FULL_AXES)), ids=name_of)
def test_every_combination_of_ranks_and_settings_gives_the_plain_output(
    row: Row, checkpoints: Checkpoints, thread_engines: ThreadEngines
) -> None:
    check(row, checkpoints, thread_engines)


@pytest.mark.parametrize("ranks", [(2, 2), (4, 4)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_prompt_of_any_length_around_the_borders_of_pages_and_ranks(
    page_size: int, ranks: tuple[int, int], checkpoints: Checkpoints, thread_engines: ThreadEngines
) -> None:
    """B5, B18: also prompts that leave ranks without a token. Every length from 1 to two pages a rank and one token."""
    lengths = range(1, 2 * page_size * ranks[1] + 2)
    asks = [
        Ask(prompt_of(length), (drawn(length, 5, logprobs=0) if length % 3 else greedy(5, logprobs=0)))
        for length in lengths
    ]
    check_asks(
        asks, checkpoints, thread_engines, ranks=ranks, page_size=page_size, num_draft_tokens=3, max_num_requests=8
    )


@pytest.mark.full
@pytest.mark.parametrize("ranks", GEOMETRIES)
@pytest.mark.parametrize("exchange", ExchangeStrategy)
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_prompt_of_any_border_length(
    page_size: int,
    exchange: ExchangeStrategy,
    ranks: tuple[int, int],
    checkpoints: Checkpoints,
    thread_engines: ThreadEngines,
) -> None:
    most = 2 * page_size * ranks[1] + 1
    lengths = range(1, most + 1) if most < 80 else sorted({*range(1, most, most // 24), most - 1, most})
    asks = [Ask(prompt_of(length), drawn(length, 5, logprobs=0)) for length in lengths]
    for num_draft_tokens in (1, 3, 5):
        check_asks(
            asks,
            checkpoints,
            thread_engines,
            name="parallel_long",
            ranks=ranks,
            page_size=page_size,
            num_draft_tokens=num_draft_tokens,
            max_model_len=1100,
            num_pages=-(-1100 // page_size // ranks[1]) + 1,
            exchange=exchange,
        )


@pytest.mark.parametrize(
    "ranks", [(2, 2), pytest.param((4, 2), marks=pytest.mark.full), pytest.param((8, 8), marks=pytest.mark.full)]
)
def test_contexts_of_many_selections_and_tiles(
    ranks: tuple[int, int], checkpoints: Checkpoints, thread_engines: ThreadEngines
) -> None:
    """B16, A15: far beyond `index_topk`, and beyond the 256 positions that are scored in one piece."""
    asks = [
        Ask(prompt_of(length), drawn(length, 6, logprobs=0) if length % 2 else greedy(6, logprobs=0))
        for length in (250, 257, 520, 3)
    ]
    check_asks(
        asks,
        checkpoints,
        thread_engines,
        name="parallel_long",
        ranks=ranks,
        page_size=64,
        num_draft_tokens=3,
        max_model_len=640,
        prefill_chunk_tokens=100,
    )


@pytest.mark.parametrize("ranks", [(2, 1), (4, 4)])
@pytest.mark.parametrize("num_draft_tokens", [1, 5])
def test_greedy_output_under_the_rejection_rule_is_the_plain_one(
    num_draft_tokens: int, ranks: tuple[int, int], checkpoints: Checkpoints, thread_engines: ThreadEngines
) -> None:
    asks = asks_of("zero", num_drafts=num_draft_tokens, logprobs=0)
    check_asks(
        asks,
        checkpoints,
        thread_engines,
        ranks=ranks,
        num_draft_tokens=num_draft_tokens,
        acceptance=AcceptanceRule.REJECTION,
    )


@pytest.mark.parametrize("ranks", [(2, 2), (4, 4)])
def test_draws_under_the_rejection_rule_are_those_of_one_rank(
    ranks: tuple[int, int], thread_engines: ThreadEngines
) -> None:
    """B36: what drafts were drawn from stays with its request on every rank."""
    asks = asks_of("one", num_drafts=3)
    outputs = []
    for tp_size, dcp_size in ((1, 1), ranks):
        with thread_engines.open(
            tp_size=tp_size, dcp_size=dcp_size, num_draft_tokens=3, acceptance=AcceptanceRule.REJECTION
        ) as running:
            results = serve(running.engine(), asks)
            outputs.append([(result.token_ids, result.speculation) for result in results])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("seed", [None, 4])
def test_a_wrong_token_has_no_excuse(seed: int | None, checkpoints: Checkpoints, thread_engines: ThreadEngines) -> None:
    """What judges differences sees one that is no matter of rounding, and why the right token was right."""
    rules = {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    ask = Ask(prompt_of(23), greedy(8, **rules) if seed is None else drawn(seed, 8, **rules))
    (right,) = tokens(thread_engines.plain([ask], **ONE_RANK))
    wrong = (*right[:5], (right[5] + 1) % VOCAB_SIZE, *right[6:])
    difference = first_difference(checkpoints.load("parallel"), ask, wrong, right)
    assert difference is not None
    assert difference.place == 5
    assert not difference.is_excused
    assert difference.token_gap > 0  # of wrong and right; the right one scores more than any other
    assert first_difference(checkpoints.load("parallel"), ask, right, right) is None
    cut = first_difference(checkpoints.load("parallel"), ask, right[:5], right)
    assert cut is not None
    assert not cut.is_excused


def check(row: Row, checkpoints: Checkpoints, thread_engines: ThreadEngines) -> None:
    page_size, dcp_size, num_drafts = row["page_size"], row["ranks"][1], row["num_draft_tokens"]
    run = page_size * dcp_size
    # The borders of pages and of rounds of pages over the ranks, and one far beyond what is selected.
    lengths = [
        min(max(1, length), LONGEST_PROMPT)
        for length in (run, 1, 62, run + 1, page_size + 1, 2 * run + 1, run - 1, page_size)
    ]
    asks = asks_of(row["temperature"], num_drafts=num_drafts, lengths=lengths, logprobs=0)
    max_model_len = max(lengths) + 16
    pages_of_request = -(-max_model_len // page_size)
    dtype, kv_format = NUMBERS[row["numbers"]]
    check_asks(
        asks,
        checkpoints,
        thread_engines,
        ranks=row["ranks"],
        draft=row["draft"],
        is_warm=row["prefixes"] == "warm",
        dtype=dtype,
        page_size=page_size,
        num_draft_tokens=num_drafts,
        num_pages=-(-pages_of_request // dcp_size) if row["memory"] == "one request" else None,
        max_model_len=max_model_len,
        prefill_chunk_tokens=row["prefill_chunk_tokens"],
        prefix_cache=row["prefixes"] != "off",
        exchange=row["exchange"],
        expert_split=row["expert_split"],
        **kv_settings(kv_format),
    )


def check_asks(
    asks: Sequence[Ask],
    checkpoints: Checkpoints,
    thread_engines: ThreadEngines,
    *,
    ranks: tuple[int, int],
    name: str = "parallel",
    draft: MtpIndexSharing | str = MtpIndexSharing.ANCHOR,
    is_warm: bool = False,
    **settings: Any,
) -> None:
    """Compare with plain decoding on the same ranks exactly, and with one rank."""
    tp_size, dcp_size = ranks
    settings = {"max_num_requests": 8, "page_size": 4, **settings}
    bits = ("page_size", "dtype", "kv_format", "kv_scale", "exchange", "expert_split", "max_model_len")
    deciding = {key: settings[key] for key in bits if key in settings}
    plain = thread_engines.plain(asks, name, tp_size=tp_size, dcp_size=dcp_size, **deciding)
    is_mtp = isinstance(draft, MtpIndexSharing)
    num_drafts = settings["num_draft_tokens"]
    sharing = draft if is_mtp else None
    with thread_engines.open(
        name,
        tp_size=tp_size,
        dcp_size=dcp_size,
        with_draft=is_mtp and num_drafts > 0,
        mtp_index_sharing=sharing,
        **settings,
    ) as running:
        running.poison()
        engine = running.engine(draft_source=source_of(draft, asks, tokens(plain), num_drafts=num_drafts))
        if is_warm:
            serve(engine, [Ask(ask.prompt[: (len(ask.prompt) + 1) // 2], ask.params) for ask in asks])
            serve(engine, asks[::2])
        results = serve(engine, asks)
        assert engine.kv_pages()[0] == engine.kv_pages()[1]
    assert tokens(results) == tokens(plain)
    one_rank = thread_engines.plain(asks, name, **ONE_RANK, **deciding)
    if is_exact := settings.get("dtype", torch.float32) is torch.float32 and settings.get("kv_format") is None:
        assert_equal_but_for_narrow_choices(checkpoints.load(name), asks, tokens(results), tokens(one_rank))
    most = MOST_LOGPROB_DISTANCE if is_exact else LOOSE_LOGPROB_DISTANCE
    assert logprob_distance(results, one_rank) < most
    if is_exact and is_mtp and num_drafts and settings.get("num_pages") is None:
        drafted = {**deciding, "num_draft_tokens": num_drafts, "mtp_index_sharing": sharing}
        with thread_engines.open(name, **ONE_RANK, **drafted) as running:
            alone = serve(running.engine(), asks)
        assert [result.speculation for result in results] == [result.speculation for result in alone]


@pytest.mark.parametrize("ranks", [(4, 4), (4, 2)])
def test_log_probabilities_have_the_same_bits_alone_and_among_others(
    ranks: tuple[int, int], checkpoints: Checkpoints, thread_engines: ThreadEngines
) -> None:
    """Which rank a request's first page lies on depends on what else runs; what is added in which order does not."""
    asks = [
        Ask(prompt_of(n), greedy(10, logprobs=0) if n % 2 else drawn(n, 10, logprobs=0)) for n in (1, 5, 18, 33, 62)
    ]

    def logprobs(results: Sequence[GenerationResult]) -> list[list[float]]:
        return [[each.raw_logprob for each in result.choices[0].logprobs or ()] for result in results]

    settings = {"tp_size": ranks[0], "dcp_size": ranks[1], "prefix_cache": False}
    with thread_engines.open(num_draft_tokens=0, **settings) as running:
        engine = running.engine()
        alone = logprobs([result for ask in asks for result in serve(engine, [ask])])
    for num_draft_tokens in (0, 3):
        with thread_engines.open(num_draft_tokens=num_draft_tokens, **settings) as running:
            assert logprobs(serve(running.engine(), asks)) == alone
