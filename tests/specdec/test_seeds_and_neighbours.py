"""A request with a seed gives the same text whoever is served beside it."""

from dataclasses import replace

import pytest

from specdec.sampling.sampling_params import SamplingParams
from tests.support.engines import Ask, Checkpoints, drawn, greedy, prompt_of, serve, tokens

PROBE = Ask(prompt_of(11), drawn(42, 32))


def unseeded(index: int, max_tokens: int) -> Ask:
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
    return Ask(prompt_of(1 + index % 9, seed=index), params)


@pytest.mark.parametrize(("num_draft_tokens", "attention"), [(0, "dense"), (3, "sparse"), (3, "dense")])
def test_seed_gives_the_same_text_alone_in_batches_and_after_others(
    num_draft_tokens: int, attention: str, checkpoints: Checkpoints
) -> None:
    expected = checkpoints.plain(PROBE, attention)
    engine = checkpoints.engine(attention, num_draft_tokens=num_draft_tokens)
    assert tokens([serve(engine, [PROBE])[0] for _ in range(5)]) == [expected] * 5
    for size in (2, 4, 8):
        others = [unseeded(index, 20 + index) for index in range(size - 1)]
        place = size // 2
        results = serve(engine, [*others[:place], PROBE, *others[place:]])
        assert results[place].token_ids == expected
    serve(engine, [unseeded(index, 1) for index in range(100)])
    assert serve(engine, [PROBE])[0].token_ids == expected


def test_different_seeds_and_no_seed_give_different_texts(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)
    asks = [
        replace(PROBE, params=replace(PROBE.params, seed=seed)) for seed in (42, 43, 42 + (1 << 63), -1, None, None)
    ]
    assert len(set(tokens(serve(engine, asks)))) == len(asks)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("acceptance", ["sampled", "rejection"])
def test_greedy_request_is_untouched_by_drawing_neighbours_at_every_place(
    acceptance: str, num_draft_tokens: int, checkpoints: Checkpoints
) -> None:
    probe = Ask(prompt_of(11), greedy(12))
    expected = checkpoints.plain(probe)
    temperatures = (0.0, 0.1, 1.0, 0.1, 1.0, 1.0, 0.1)
    others = [
        Ask(prompt_of(3 + index, seed=index), SamplingParams(temperature=t, seed=seed, max_tokens=13, ignore_eos=True))
        for index, (seed, t) in enumerate(zip((1, 2, None, 3, None, 4, 5), temperatures, strict=True))
    ]
    engine = checkpoints.engine(num_draft_tokens=num_draft_tokens, acceptance=acceptance)
    for place in range(8):
        assert serve(engine, [*others[:place], probe, *others[place:]])[place].token_ids == expected


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_logprobs_have_the_same_bits_alone_and_among_neighbours(
    num_draft_tokens: int, checkpoints: Checkpoints
) -> None:
    probe = Ask(prompt_of(11), drawn(5, 16, logprobs=5, prompt_logprobs=5, temperature=0.9))
    engine = checkpoints.engine(num_draft_tokens=num_draft_tokens)
    (alone,) = serve(engine, [probe])
    for size in (2, 3, 5, 8):
        others = [unseeded(index, 20) for index in range(size - 1)]
        among = serve(engine, [*others, probe])[-1]
        assert among.choices[0].logprobs == alone.choices[0].logprobs
        assert among.prompt_logprobs == alone.prompt_logprobs


def test_rejection_repeats_itself_for_the_same_seed(checkpoints: Checkpoints) -> None:
    """This rule promises the distribution only; alone or among others, its random numbers are still the seed's."""
    engine = checkpoints.engine(num_draft_tokens=3, acceptance="rejection")
    (alone,) = serve(engine, [PROBE])
    assert serve(engine, [PROBE])[0].token_ids == alone.token_ids
    others = [unseeded(index, 25) for index in range(5)]
    assert serve(engine, [*others, PROBE])[-1].token_ids == alone.token_ids
