"""The OpenAI SDK against a server with glm-tiny: what people do with it."""

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, conint, conlist

from specdec.engine import Engine
from specdec.sampling.sampling_params import SamplingParams
from tests.support.running_server import RunningServer

pytestmark = pytest.mark.xdist_group("glm_tiny_server")

CODE = "def read_lines(path):\n"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client(tiny_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["glm-tiny", "alias"]
    assert client.models.retrieve("alias").owned_by == "specdec"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_completion_is_the_engines_streamed_and_not(client: openai.OpenAI, glm_tiny: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    (expected,) = glm_tiny.generate(CODE, params)
    ids = glm_tiny.encode(CODE)
    for prompt in (CODE, ids):
        whole = client.completions.create(model="glm-tiny", prompt=prompt, temperature=0, max_tokens=24)
        assert whole.choices[0].text == expected.text
        assert whole.choices[0].finish_reason == expected.finish_reason
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(expected.token_ids)
        pieces = list(
            client.completions.create(
                model="glm-tiny",
                prompt=prompt,
                temperature=0,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert "".join(choice.text for piece in pieces for choice in piece.choices) == expected.text
        assert pieces[-1].usage is not None
        assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert whole.usage.completion_tokens_details is not None
        speculation = expected.speculation
        assert whole.usage.completion_tokens_details.accepted_prediction_tokens == speculation.num_accepted_tokens


def test_seed_gives_the_same_text_alone_and_among_choices(client: openai.OpenAI, glm_tiny: Engine) -> None:
    (expected,) = glm_tiny.generate(CODE, SamplingParams(temperature=1, top_p=0.95, seed=7, n=3, max_tokens=10))
    answer = client.completions.create(model="alias", prompt=CODE, temperature=1, seed=7, n=3, max_tokens=10)
    assert answer.model == "alias"
    assert [choice.text for choice in answer.choices] == [choice.text for choice in expected.choices]


def test_logprobs_are_those_of_the_engine(client: openai.OpenAI, glm_tiny: Engine) -> None:
    (expected,) = glm_tiny.generate(CODE, SamplingParams(temperature=0, max_tokens=4, logprobs=2))
    assert expected.choices[0].logprobs is not None
    own = [token.raw_logprob for token in expected.choices[0].logprobs]
    answer = client.completions.create(model="glm-tiny", prompt=CODE, temperature=0, max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx(own)
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])


def test_tool_is_called_and_answered_over_turns(client: openai.OpenAI) -> None:
    messages = list(QUESTION)
    answer = client.chat.completions.create(
        model="glm-tiny", messages=messages, tools=[WEATHER], temperature=0, max_tokens=120
    )
    check_call(answer)
    with client.chat.completions.stream(
        model="glm-tiny", messages=messages, tools=[WEATHER], temperature=0, max_tokens=120
    ) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    check_call(streamed)
    reasoning = answer.choices[0].message.model_extra
    assert reasoning is not None
    assert reasoning["reasoning_content"]
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": calls[0].id, "content": "18 degrees"}]
    last = client.chat.completions.create(
        model="glm-tiny", messages=messages, tools=[WEATHER], temperature=0, max_tokens=60
    )
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].message.content
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    # All whole pages of the first turn, those of the reply included, and not the last token.
    assert last.usage.prompt_tokens_details.cached_tokens == (last.usage.prompt_tokens - 1) // 64 * 64 == 128


def check_call(answer: ChatCompletion) -> None:
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


class Forecast(BaseModel):
    """What glm-tiny can be made to say in few tokens."""

    city: Literal["Paris", "Rome"]
    degrees: conlist(conint(ge=0, le=40), max_length=2)  # type: ignore[valid-type]


@pytest.mark.parametrize("effort", ["none", "high"])
def test_structured_output_is_parsed(client: openai.OpenAI, effort: Any) -> None:
    fields: dict[str, Any] = {
        "model": "glm-tiny",
        "messages": QUESTION,
        "response_format": Forecast,
        "reasoning_effort": effort,
        "max_tokens": 150,
    }
    for seed in (2, 3):
        (choice,) = client.chat.completions.parse(**fields, seed=seed).choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Forecast)
        with client.chat.completions.stream(**fields, seed=seed) as stream:
            for _ in stream:
                pass
            (streamed,) = stream.get_final_completion().choices
        assert streamed.message.content == choice.message.content
        assert streamed.message.parsed == choice.message.parsed


def test_any_json_object_can_be_asked_for(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model="glm-tiny",
        messages=QUESTION,
        response_format={"type": "json_object"},
        reasoning_effort="none",
        max_tokens=60,
        seed=1,
    ).choices
    assert choice.message.content is not None
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_call_is_made_where_it_is_required(client: openai.OpenAI, choice: Any) -> None:
    other: Any = {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]},
        },
    }
    for effort in ("none", "high"):
        fields: dict[str, Any] = {
            "model": "glm-tiny",
            "messages": [{"role": "user", "content": "Hello"}],
            "tools": [WEATHER, other],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "reasoning_effort": effort,
            "max_tokens": 100,
            "seed": 5,
        }
        whole = client.chat.completions.create(**fields).choices[0]
        with client.chat.completions.stream(**fields) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        for answer in (whole, streamed):
            assert answer.finish_reason == "tool_calls"
            assert not answer.message.content
            assert answer.message.tool_calls is not None
            (call,) = answer.message.tool_calls
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            if choice != "required":
                assert (call.function.name, arguments["zone"] in ("UTC", "CET")) == ("get_time", True)
            assert call.function.name in ("get_time", "get_weather")


def test_answer_has_its_form_or_is_a_call_where_both_are_possible(client: openai.OpenAI, glm_tiny: Engine) -> None:
    (begin_call,) = glm_tiny.encode("<tool_call>")
    mood: Any = {"type": "json_schema", "json_schema": {"name": "mood", "schema": {"enum": ["good", "bad"]}}}
    fields: dict[str, Any] = {"model": "glm-tiny", "messages": QUESTION, "tools": [WEATHER], "response_format": mood}
    check_call(client.chat.completions.create(**fields, temperature=0, max_tokens=100))
    (choice,) = client.chat.completions.create(
        **fields, temperature=0, max_tokens=100, logit_bias={str(begin_call): -100}
    ).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is not None
    assert json.loads(choice.message.content) in ("good", "bad")


def test_refused_requests_raise_the_sdks_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="glm-tiny", messages=QUESTION, temperature=-1)
    assert (refusal.value.param, refusal.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="glm-tiny", prompt=[5] * 5000)
    assert refusal.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")


def test_many_at_once_get_what_they_would_alone(tiny_server: RunningServer, glm_tiny: Engine) -> None:
    prompts = [f"def function_{index}(" for index in range(12)]
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = [result.text for result in glm_tiny.generate(prompts, params)]

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:

            async def stream(prompt: str) -> str:
                pieces = await client.completions.create(
                    model="glm-tiny", prompt=prompt, temperature=0, max_tokens=8, stream=True
                )
                return "".join([choice.text async for piece in pieces for choice in piece.choices])

            async def leave(prompt: str) -> None:
                pieces = await client.completions.create(
                    model="glm-tiny", prompt=prompt, temperature=0, max_tokens=500, stream=True
                )
                async for _ in pieces:
                    break
                await pieces.close()

            *texts, _, _ = await asyncio.gather(*map(stream, prompts), leave("import os"), leave("import sys"))
            return [text for text in texts if text is not None]

    assert asyncio.run(run()) == expected
