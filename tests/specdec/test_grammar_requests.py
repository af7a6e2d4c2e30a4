"""What a request with a grammar may ask beside it, and what it is told where that leaves no reply.

Masks come after penalties, bias and bans, and before top-k, top-p and min-p. An id that ends the text is allowed where
the grammar may end, and nowhere else.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.errors import RequestError
from specdec.grammar.grammar import Grammar
from specdec.replies.reply_markup import ReplyMarkup
from specdec.replies.reply_parser import ReplyParser
from specdec.result import GenerationResult
from specdec.sampling.sampling_params import SamplingParams
from tests.support.engines import SPARSE, Ask, Checkpoints, prompt_of, serve
from tests.support.grammars import FORECAST, is_valid
from tests.support.handoff import serving

USER, OBSERVATION = map(SPARSE.special_id, ("<|user|>", "<|observation|>"))
PROMPT = prompt_of(5)


def byte_of(character: str) -> int:
    """The id of an ASCII character in the tokenizer of the tests, whose first ids are the bytes in order."""
    return ord(character) - ord("!")


def serve_both(checkpoints: Checkpoints, params: SamplingParams) -> GenerationResult:
    """The reply, which speculation does not change."""
    plain, speculative = (
        serve(checkpoints.engine(num_draft_tokens=count), [Ask(PROMPT, params)])[0] for count in (0, 4)
    )
    assert speculative.choices[0] == replace(plain.choices[0], speculation=speculative.choices[0].speculation)
    return plain


def asked(pattern: str, **given: Any) -> SamplingParams:
    return SamplingParams(**{"grammar": Grammar.regex(pattern), "seed": 7, "max_tokens": 60, **given})


def test_ids_of_the_tests_are_bytes(checkpoints: Checkpoints) -> None:
    assert checkpoints.tokenizer().encode("ab!~") == list(map(byte_of, "ab!~"))


def test_text_ends_by_an_end_id_where_the_grammar_has_ended(checkpoints: Checkpoints) -> None:
    result = serve_both(checkpoints, asked("abc"))
    (choice,) = result.choices
    assert (choice.text, choice.finish_reason) == ("abc", "stop")
    assert choice.token_ids[-1] in checkpoints.engine().eos_ids


def test_text_may_end_or_go_on_where_the_grammar_may_end(checkpoints: Checkpoints) -> None:
    results = serve(
        checkpoints.engine(num_draft_tokens=3),
        [Ask(PROMPT, asked("a{2,5}", seed=seed, logit_bias={USER: 5.0})) for seed in range(24)],
    )
    assert {result.text for result in results} >= {"aa", "aaa", "aaaa"}
    assert all(result.choices[0].finish_reason == "stop" for result in results)


def test_end_ids_are_those_of_the_checkpoint_and_of_the_request(checkpoints: Checkpoints) -> None:
    stop = byte_of("!")
    result = serve_both(checkpoints, asked("[!a]{3}", stop_token_ids=[stop], logit_bias={stop: 100.0}))
    assert result.text == "aaa"  # a stop id is no part of the text, also where the grammar would take it
    assert result.token_ids[-1] == stop


def test_end_ids_that_do_not_stop_follow_the_end_until_the_limit(checkpoints: Checkpoints) -> None:
    result = serve_both(checkpoints, asked("ab", ignore_eos=True, max_tokens=9))
    assert result.choices[0].finish_reason == "length"
    assert result.text == "ab"
    assert len(result.token_ids) == 9
    assert set(result.token_ids[-5:]) <= set(checkpoints.engine().eos_ids)
    stopped = serve_both(checkpoints, asked("ab", ignore_eos=True, stop_token_ids=[3], logit_bias={3: 100.0}))
    assert stopped.token_ids[-1] == 3
    assert stopped.choices[0].finish_reason == "stop"


def test_limit_cuts_the_text(checkpoints: Checkpoints) -> None:
    for max_tokens in (1, 2, 3, 4):
        result = serve_both(checkpoints, asked("[a-z]{9}", max_tokens=max_tokens))
        assert result.choices[0].finish_reason == "length"
        assert len(result.token_ids) == max_tokens


def test_stop_string_cuts_the_text(checkpoints: Checkpoints) -> None:
    result = serve_both(checkpoints, asked("a{4}b", stop=("aaa",)))
    assert (result.text, result.choices[0].finish_reason) == ("", "stop")
    result = serve_both(checkpoints, asked("a{4}b", stop=("aaa",), include_stop_in_output=True))
    assert result.text == "aaa"


def test_min_tokens_hold_while_the_grammar_goes_on(checkpoints: Checkpoints) -> None:
    result = serve_both(checkpoints, asked("a*", min_tokens=9, logit_bias={USER: 100.0}))
    assert len(result.token_ids) == 10
    assert set(result.text) == {"a"}


NO_TOKEN = "its grammar and its bans, min_tokens among them, leave no token; allow more"


@pytest.mark.parametrize(
    ("given", "num_tokens"),
    [
        ({"min_tokens": 30}, 3),
        ({"banned_token_ids": [byte_of("b")]}, 1),
        ({"allowed_token_ids": [byte_of("a"), USER]}, 1),
        ({"allowed_token_ids": [byte_of("a"), byte_of("b"), byte_of("c")]}, 3),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reply_without_a_token_fails_with_the_reason(
    given: dict[str, Any], num_tokens: int, temperature: float, checkpoints: Checkpoints
) -> None:
    """And what runs beside it goes on."""
    for num_draft_tokens in (0, 4):
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens)
        with engine.stream(list(PROMPT), asked("[a-z]{5}")) as beside:
            with pytest.raises(RequestError, match=NO_TOKEN) as caught:
                serve(engine, [Ask(PROMPT, asked("abc", temperature=temperature, **given))])
            assert len(beside.result().choices[0].text) == 5
        if num_draft_tokens == 0:
            assert f"after {num_tokens} output tokens" in str(caught.value)


def test_grammar_that_grows_too_complex_fails_with_the_reason(checkpoints: Checkpoints) -> None:
    params = asked("(.{1,1000}){1,1000}\t", max_tokens=120, banned_token_ids=[])
    for num_draft_tokens in (0, 3):
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens)
        with pytest.raises(RequestError, match="its grammar cannot be followed further: lexer error"):
            serve(engine, [Ask(PROMPT, params)])
        assert serve(engine, [Ask(PROMPT, asked("abc"))])[0].text == "abc"
        assert engine.kv_pages()[0] == engine.kv_pages()[1]


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_masks_come_before_the_cuts(cut: dict[str, Any], checkpoints: Checkpoints) -> None:
    greedy = serve_both(checkpoints, asked("[a-e]{8}", temperature=0))
    cut_to_one = serve_both(checkpoints, asked("[a-e]{8}", temperature=1.0, **cut))
    assert cut_to_one.token_ids == greedy.token_ids


def test_masks_come_after_bias_and_penalties(checkpoints: Checkpoints) -> None:
    wanted = {byte_of("z"): 100.0, byte_of("c"): 50.0}
    assert serve_both(checkpoints, asked("[a-e]{4}", temperature=0, logit_bias=wanted)).text == "cccc"
    varied = asked("[a-e]{5}", temperature=0, frequency_penalty=2.0, logit_bias={byte_of(c): 60.0 for c in "abcde"})
    assert len(set(serve_both(checkpoints, varied).text)) > 1


def test_logprobs_are_those_of_what_is_drawn_from(checkpoints: Checkpoints) -> None:
    result = serve_both(checkpoints, asked("[qx]{3}", logprobs=3))
    logprobs = result.choices[0].logprobs
    assert logprobs is not None
    for entry, character in zip(logprobs, result.text, strict=False):
        assert entry.token_id == byte_of(character)
        likely = {token_id: logprob for token_id, logprob in entry.top if math.isfinite(logprob)}
        assert set(likely) == {byte_of("q"), byte_of("x")}
        assert math.isclose(sum(map(math.exp, likely.values())), 1.0, rel_tol=1e-5)


def test_request_is_checked_before_anything_runs(checkpoints: Checkpoints) -> None:
    bare = Engine(checkpoints.load(), EngineConfig(page_size=4, max_model_len=128))
    with pytest.raises(RequestError, match=r"grammar: needs the checkpoint's tokenizer.json") as caught:
        serve(bare, [Ask(PROMPT, asked("a"))])
    assert caught.value.parameter == "grammar"
    endless = Engine(
        checkpoints.load(), EngineConfig(page_size=4, max_model_len=128), tokenizer=checkpoints.tokenizer(), eos_ids=[]
    )
    with pytest.raises(RequestError, match="grammar: needs an id that ends the text"):
        serve(endless, [Ask(PROMPT, asked("a"))])
    assert serve(endless, [Ask(PROMPT, asked("a", stop_token_ids=[9]))])[0].text == "a"
    with pytest.raises(RequestError, match="grammar: json_schema cannot be followed: no token goes on with it"):
        serve(checkpoints.engine(), [Ask(PROMPT, asked("a", grammar=Grammar.json_schema({"$ref": "#"})))])


def test_streamed_pieces_join_to_the_text(checkpoints: Checkpoints) -> None:
    params = asked('"(日本|é){3,6}"')
    whole = serve_both(checkpoints, params)
    with checkpoints.engine(num_draft_tokens=4).stream(list(PROMPT), params) as stream:
        pieces = [delta.text for delta in stream]
    assert "".join(pieces) == whole.text
    assert whole.choices[0].finish_reason == "stop"


def test_prompt_from_a_prefill_begins_with_the_grammar(checkpoints: Checkpoints) -> None:
    params = asked("(sun|rain), -?[0-9]{1,2}", n=2)
    (expected,) = serve(checkpoints.engine(num_draft_tokens=0), [Ask(PROMPT, params)])
    with serving(checkpoints.engine(num_draft_tokens=3, transport="local")) as server:
        engine = checkpoints.engine(num_draft_tokens=3, transport="local", prefill=(server.address,))
        with engine:
            (result,) = serve(engine, [Ask(PROMPT, params)])
    assert [choice.token_ids for choice in result.choices] == [choice.token_ids for choice in expected.choices]


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "days"],
        },
    },
}


def test_forced_call_follows_the_reasoning_and_fits_its_schema() -> None:
    engines = [Engine.from_pretrained("glm-tiny", num_draft_tokens=count) for count in (0, 4)]
    tokenizer = engines[0].tokenizer
    assert tokenizer is not None
    markup = ReplyMarkup.of(tokenizer, end_ids=engines[0].eos_ids)
    grammar = Grammar.tool_calls(markup, [WEATHER], is_parallel=False)
    prompts: Sequence[list[int]] = [
        engines[0].apply_chat_template([{"role": "user", "content": text}], tools=[WEATHER])
        for text in ("Tell me a story.", "What is the weather in Lisbon?")
    ]
    params = SamplingParams(temperature=0, max_tokens=120, grammar=grammar, skip_special_tokens=False)
    plain, speculative = (engine.generate(prompts, params) for engine in engines)
    for prompt, result, again in zip(prompts, plain, speculative, strict=True):
        assert again.token_ids == result.token_ids
        parser = ReplyParser(
            markup, tools=[WEATHER], starts_in_reasoning=markup.starts_in_reasoning(prompt), parses_tool_calls=True
        )
        deltas = [parser.push(result.token_ids, result.text), parser.finish()]
        calls = list(itertools.chain.from_iterable(delta.tool_calls for delta in deltas))
        assert {call.name for call in calls} == {"get_weather", *(call.name for call in calls if call.name is None)}
        arguments = "".join(call.arguments for call in calls)
        assert is_valid({**WEATHER["function"]["parameters"], "additionalProperties": False}, arguments)  # type: ignore[dict-item]
        assert "".join(delta.reasoning for delta in deltas)
        assert not "".join(delta.content for delta in deltas)


def test_glm_tiny_answers_by_a_schema_after_it_has_thought() -> None:
    prompt = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    params = SamplingParams(temperature=0, max_tokens=200, grammar=Grammar.json_schema(FORECAST))
    plain, speculative = (
        Engine.from_pretrained("glm-tiny", num_draft_tokens=count).generate([prompt], params)[0] for count in (0, 3)
    )
    for choice, again in zip(plain.choices, speculative.choices, strict=True):
        assert again.token_ids == choice.token_ids
        thought, _, answer = choice.text.rpartition("</think>")
        assert thought
        assert is_valid(FORECAST, answer)
