"""Where an output ends, against the same judged one token at a time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.sampling.finish import FinishReason, FinishRule, OutputJudge, finish_of_run
from specdec.sampling.sampling_params import SamplingParams
from specdec.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import write_tokenizer

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(path)
    return Tokenizer(path)


def rule(*, stop_ids: set[int] | None = None, min_tokens: int = 0, max_tokens: int = 100) -> FinishRule:
    return FinishRule(stop_ids=frozenset(stop_ids or ()), min_tokens=min_tokens, max_tokens=max_tokens)


def judge(tokenizer: Tokenizer | None, *, room: int = 100, eos: tuple[int, ...] = (), **asked: Any) -> OutputJudge:
    params = SamplingParams(**asked)
    return OutputJudge(params, FinishRule.of(params, eos_token_ids=eos, max_tokens=room), tokenizer)


def run(output: OutputJudge, token_ids: list[int], run_length: int) -> tuple[list[int], str, FinishReason | None]:
    """Push ids in runs until the output ends."""
    delivered: list[int] = []
    text = ""
    for start in range(0, len(token_ids), run_length):
        delivery = output.push(token_ids[start : start + run_length])
        delivered += delivery.token_ids
        text += delivery.text
        if delivery.finish.finish_reason is not None:
            return delivered, text, delivery.finish.finish_reason
    return delivered, text + output.flush(), None


@pytest.mark.parametrize("run_length", [1, 2, 3, 4, 6])
def test_a_stop_goes_before_the_cap_at_every_offset_of_a_run(run_length: int) -> None:
    token_ids = list(range(10, 22))
    for position in range(12):
        for cap in range(max(1, position - 1), position + 5):
            output = judge(None, stop_token_ids=[token_ids[position]], max_tokens=cap)
            delivered, _, reason = run(output, token_ids, run_length)
            if position < cap:
                assert (delivered, reason) == (token_ids[: position + 1], FinishReason.STOP)
            else:
                assert (delivered, reason) == (token_ids[:cap], FinishReason.LENGTH)


@given(
    token_ids=st.lists(st.integers(0, 4), max_size=8),
    stop_ids=st.sets(st.integers(0, 4), max_size=2),
    num_output=st.integers(0, 5),
    min_tokens=st.integers(0, 8),
    more=st.integers(1, 9),
)
def test_a_run_is_judged_like_its_tokens_one_by_one(
    token_ids: list[int], stop_ids: set[int], num_output: int, min_tokens: int, more: int
) -> None:
    finish_rule = rule(stop_ids=stop_ids, min_tokens=min_tokens, max_tokens=num_output + more)
    expected, reason = 0, None
    for index, token_id in enumerate(token_ids):
        expected = index + 1
        if token_id in stop_ids and num_output + index >= min_tokens:
            reason = FinishReason.STOP
        elif num_output + index + 1 == finish_rule.max_tokens:
            reason = FinishReason.LENGTH
        if reason:
            break
    finish = finish_of_run(token_ids, finish_rule, num_output=num_output)
    assert (finish.num_delivered, finish.finish_reason) == (expected, reason)
    assert finish.stop == (token_ids[expected - 1] if reason is FinishReason.STOP else None)


def test_end_of_sequence_ids_stop_unless_ignored_and_own_stop_ids_always() -> None:
    params = SamplingParams(stop_token_ids=(7,), max_tokens=5)
    assert FinishRule.of(params, eos_token_ids=[EOS, 2], max_tokens=9) == rule(stop_ids={7, EOS, 2}, max_tokens=5)
    ignoring = SamplingParams(stop_token_ids=(7,), ignore_eos=True)
    assert FinishRule.of(ignoring, eos_token_ids=[EOS, 2], max_tokens=9) == rule(stop_ids={7}, max_tokens=9)
    assert FinishRule.of(params, eos_token_ids=[], max_tokens=3).max_tokens == 3


@pytest.mark.parametrize("run_length", [1, 2, 3, 6])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_ids_and_text_at_every_offset(tokenizer: Tokenizer, run_length: int, include: bool) -> None:
    token_ids = tokenizer.encode("the quick brown fox 你好 jumps")
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    for length in range(1, 7):
        for start in range(0, len(text) - length + 1, 2):
            stop = text[start : start + length]
            end = text.index(stop) + length
            output = judge(tokenizer, stop=stop, include_stop_in_output=include)
            delivered, shown, reason = run(output, token_ids, run_length)
            assert shown == (text[:end] if include else text[: end - length])
            assert reason is FinishReason.STOP
            # The last delivered token is the one that completes the stop string.
            assert len(tokenizer.decode(delivered[:-1], skip_special_tokens=True).rstrip("\ufffd")) < end
            assert len(tokenizer.decode(delivered, skip_special_tokens=True)) >= end


def test_a_stop_string_goes_before_the_cap_at_the_same_token(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a b c d")
    output = judge(tokenizer, stop="c", max_tokens=len(tokenizer.encode("a b c")))
    delivery = output.push(token_ids)
    assert (delivery.finish.finish_reason, delivery.finish.stop, delivery.text) == (FinishReason.STOP, "c", "a b ")


def test_a_stop_string_of_the_first_tokens_is_passed_over(tokenizer: Tokenizer) -> None:
    token_ids = [tokenizer.encode(character)[0] for character in "abcabc"]
    delivered, text, reason = run(judge(tokenizer, stop="b", min_tokens=2), token_ids, 4)
    assert (len(delivered), text, reason) == (5, "abca", FinishReason.STOP)


@pytest.mark.parametrize("run_length", [1, 2, 5])
def test_the_text_of_a_stop_id_is_shown_only_when_asked_for(tokenizer: Tokenizer, run_length: int) -> None:
    (user,) = tokenizer.encode("<|user|>")
    token_ids = [*tokenizer.encode("hi"), user, *tokenizer.encode("more")]
    for asked, shown in (
        ({}, "hi"),
        ({"skip_special_tokens": False}, "hi"),
        ({"include_stop_in_output": True}, "hi"),
        ({"include_stop_in_output": True, "skip_special_tokens": False}, "hi<|user|>"),
    ):
        delivered, text, reason = run(judge(tokenizer, eos=(user,), **asked), token_ids, run_length)
        assert (delivered[-1], text, reason) == (user, shown, FinishReason.STOP)


def test_held_back_text_is_shown_when_the_output_ends_otherwise(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("say STO")
    assert judge(tokenizer, stop="STOP", max_tokens=len(token_ids)).push(token_ids).text == "say STO"
    cancelled = judge(tokenizer, stop="STOP")
    assert cancelled.push(token_ids).text + cancelled.flush() == "say STO"


def test_half_a_character_at_the_cap_becomes_a_replacement(tokenizer: Tokenizer) -> None:
    lead_byte = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    delivery = judge(tokenizer, max_tokens=1).push([lead_byte, lead_byte])
    assert (delivery.token_ids, delivery.text) == ((lead_byte,), "\N{REPLACEMENT CHARACTER}")


def test_stop_strings_need_a_tokenizer_and_ids_do_not() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        judge(None, stop="x")
    delivery = judge(None, eos=(EOS,)).push([5, EOS, 6])
    assert (delivery.token_ids, delivery.text, delivery.finish.stop) == ((5, EOS), "", EOS)
