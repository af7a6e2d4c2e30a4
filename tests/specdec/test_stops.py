"""Where an output ends is judged token by token, wherever the end lies in an accepted run.

The oracle draft fills every run, so that stops fall on every place of one.
"""

from collections.abc import Sequence

import pytest

from specdec.drafting.scripted_draft import ScriptedDraft
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.result import GenerationResult
from tests.support.engines import VOCAB_SIZE, Ask, Checkpoints, drawn, greedy, prompt_of, script_of, serve

DRAFT_COUNTS = (0, 1, 2, 3, 5, 7)
PROMPT = prompt_of(9)
LETTERS = list(range(65, 91))
SYLLABLES = list(range(256, 460))
PARTS_OF_CHARACTERS = [96, 98, 126, 127, 130, 250, 251, 254]  # bytes that begin or go on characters


def oracle_engine(
    checkpoints: Checkpoints, asks: Sequence[Ask], output: Sequence[int], *, num_draft_tokens: int
) -> Engine:
    source = ScriptedDraft(script_of(asks, [output] * len(asks)), vocab_size=VOCAB_SIZE)
    return checkpoints.engine(num_draft_tokens=num_draft_tokens, draft_source=source, max_num_requests=48)


@pytest.mark.parametrize("num_draft_tokens", DRAFT_COUNTS)
def test_stop_id_and_length_limit_in_the_same_run(num_draft_tokens: int, checkpoints: Checkpoints) -> None:
    output = checkpoints.plain(Ask(PROMPT, greedy(24)))
    pairs = [(place, most) for place in range(12) for most in range(max(1, place - 1), place + 5)]
    asks = [
        Ask(PROMPT, greedy(most, seed=index, stop_token_ids=[output[place]]))
        for index, (place, most) in enumerate(pairs)
    ]
    engine = oracle_engine(checkpoints, asks, output, num_draft_tokens=num_draft_tokens)
    for (place, most), result in zip(pairs, serve(engine, asks), strict=True):
        to_stop = output.index(output[place]) + 1
        assert result.token_ids == output[: min(to_stop, most)]
        assert result.finish_reason == ("stop" if to_stop <= most else "length")
    assert engine.kv_pages()[0] == engine.kv_pages()[1]


@pytest.mark.parametrize("num_draft_tokens", DRAFT_COUNTS)
def test_stop_ids_count_only_after_min_tokens(num_draft_tokens: int, checkpoints: Checkpoints) -> None:
    asks = [
        Ask(PROMPT, greedy(14, seed=index, min_tokens=index, stop_token_ids=list(range(0, VOCAB_SIZE, 3))))
        for index in range(12)
    ]
    expected = [checkpoints.plain(ask) for ask in asks]
    for ask, output in zip(asks, expected, strict=True):
        assert all(token % 3 for token in output[: ask.params.min_tokens])
        assert len(output) > ask.params.min_tokens
    source = ScriptedDraft(script_of(asks, expected), vocab_size=VOCAB_SIZE)
    for draft_source in (None, source):
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens, draft_source=draft_source)
        assert [result.token_ids for result in serve(engine, asks)] == expected


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_end_ids_of_the_checkpoint_stop_unless_ignored(num_draft_tokens: int, checkpoints: Checkpoints) -> None:
    output = checkpoints.plain(Ask(PROMPT, greedy(16)))
    end_id = output[6]
    config = EngineConfig(num_draft_tokens=num_draft_tokens)
    engine = Engine(checkpoints.load(), config, eos_ids=[end_id, VOCAB_SIZE - 2])
    stopped, ignored = serve(engine, [Ask(PROMPT, greedy(16, ignore_eos=False)), Ask(PROMPT, greedy(16))])
    assert stopped.token_ids == output[: output.index(end_id) + 1]
    assert stopped.finish_reason == "stop"
    assert (ignored.token_ids, ignored.finish_reason) == (output, "length")


def streamed(engine: Engine, ask: Ask) -> GenerationResult:
    """The result of a stream, checked against its pieces."""
    with engine.stream(ask.prompt, ask.params) as stream:
        deltas = list(stream)
        result = stream.result()
    assert "".join(delta.text for delta in deltas) == result.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == result.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [result.finish_reason]
    return result


def outcome(result: GenerationResult) -> tuple[str, tuple[int, ...], str]:
    return result.text, result.token_ids, result.finish_reason


def stops_at_every_offset(text: str) -> list[str]:
    return sorted({text[at : at + length] for at in range(len(text)) for length in range(1, 7)})


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("alphabet", [LETTERS + SYLLABLES, LETTERS[:6] + PARTS_OF_CHARACTERS], ids=["ascii", "bytes"])
def test_stop_string_at_every_offset_of_the_text(
    alphabet: list[int], include_stop: bool, checkpoints: Checkpoints
) -> None:
    """Of one to six characters: inside of a token, across tokens, and across rounds."""
    output = checkpoints.plain(Ask(PROMPT, drawn(1, 14, allowed_token_ids=alphabet)))
    text = checkpoints.tokenizer().decode(output, skip_special_tokens=True)
    asks = [
        Ask(PROMPT, drawn(1, 14, allowed_token_ids=alphabet, stop=stop, include_stop_in_output=include_stop))
        for stop in stops_at_every_offset(text)
    ]
    plain = serve(oracle_engine(checkpoints, asks, output, num_draft_tokens=0), asks)
    engine = oracle_engine(checkpoints, asks, output, num_draft_tokens=5)
    assert [outcome(result) for result in serve(engine, asks)] == [outcome(result) for result in plain]
    for ask, result in list(zip(asks, plain, strict=True))[::7]:
        assert outcome(streamed(engine, ask)) == outcome(result)
    assert engine.kv_pages()[0] == engine.kv_pages()[1]


def test_text_before_a_stop_string_is_kept_and_nothing_follows_its_token(checkpoints: Checkpoints) -> None:
    alphabet = LETTERS + SYLLABLES
    output = checkpoints.plain(Ask(PROMPT, drawn(1, 14, allowed_token_ids=alphabet)))
    decode = checkpoints.tokenizer().decode
    text = decode(output, skip_special_tokens=True)
    stops = stops_at_every_offset(text)
    asks = [Ask(PROMPT, drawn(1, 14, allowed_token_ids=alphabet, stop=stop)) for stop in stops]
    results = serve(oracle_engine(checkpoints, asks, output, num_draft_tokens=5), asks)
    for stop, result in zip(stops, results, strict=True):
        end = text.index(stop) + len(stop)
        assert result.text == text[: text.index(stop)]
        assert result.finish_reason == "stop"
        assert result.token_ids == output[: len(result.token_ids)]
        assert len(decode(result.token_ids[:-1], skip_special_tokens=True)) < end
        assert len(decode(result.token_ids, skip_special_tokens=True)) >= end


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("num_draft_tokens", [0, 5])
def test_text_of_a_stop_id_is_left_out_unless_asked_for(
    num_draft_tokens: int, include_stop: bool, checkpoints: Checkpoints
) -> None:
    output = checkpoints.plain(Ask(PROMPT, drawn(1, 10, allowed_token_ids=SYLLABLES)))
    params = drawn(1, 10, allowed_token_ids=SYLLABLES, stop_token_ids=[output[7]], include_stop_in_output=include_stop)
    ask = Ask(PROMPT, params)
    (result,) = serve(oracle_engine(checkpoints, [ask], output, num_draft_tokens=num_draft_tokens), [ask])
    num_tokens = output.index(output[7]) + 1
    visible = output[: num_tokens if include_stop else num_tokens - 1]
    assert result.token_ids == output[:num_tokens]
    assert result.text == checkpoints.tokenizer().decode(visible, skip_special_tokens=True)


@pytest.mark.parametrize("num_draft_tokens", [0, 5])
def test_stop_strings_count_only_after_min_tokens(num_draft_tokens: int, checkpoints: Checkpoints) -> None:
    output = checkpoints.plain(Ask(PROMPT, drawn(2, 20, allowed_token_ids=LETTERS)))
    text = checkpoints.tokenizer().decode(output, skip_special_tokens=True)
    assert len(text) == 20  # one letter a token
    stop = max(text, key=text.count)
    assert text.count(stop) > 1
    asks = [
        Ask(PROMPT, drawn(2, 20, allowed_token_ids=LETTERS, stop=stop, min_tokens=min_tokens))
        for min_tokens in range(20)
    ]
    engine = oracle_engine(checkpoints, asks, output, num_draft_tokens=num_draft_tokens)
    for min_tokens, result in enumerate(serve(engine, asks)):
        at = text.find(stop, min_tokens)
        assert result.text == (text if at < 0 else text[:at])
        assert result.finish_reason == ("length" if at < 0 else "stop")
