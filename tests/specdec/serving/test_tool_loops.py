"""Conversations of several rounds, each with another of glm-tiny's own tools, as the SDKs hold them.

Every turn is asked for whole and streamed, both replies must be one, and the tools' answers go back to the model.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletion

from examples.glm_tiny.tool_calls import TOOL_NAMES, ToolUse, schema, use_tool
from tests.support.running_server import RunningServer

pytestmark = pytest.mark.xdist_group("glm_tiny_server")

NUM_ROUNDS = 3
PAGE_SIZE = 64
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 9))]
WISHES: dict[str, Any] = {"model": "glm-tiny", "max_tokens": 150}


def tool_uses(seed: int) -> list[ToolUse]:
    """What a user wants in each round, with the call, the answer of the tool, and the reply about it."""
    rng = random.Random(seed)
    return [use_tool(name, rng) for name in rng.sample(TOOL_NAMES, NUM_ROUNDS)]


@pytest.mark.parametrize("seed", SEEDS)
def test_openai_sdk_holds_a_conversation_with_tools(tiny_server: RunningServer, seed: int) -> None:
    uses = tool_uses(seed)
    tools: list[Any] = [schema(use.name) for use in uses]
    messages: list[Any] = []
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:

        def reply() -> ChatCompletion:
            fields: Any = {**WISHES, "messages": messages, "tools": tools, "temperature": 0}
            whole = client.chat.completions.create(**fields)
            with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
                for _ in stream:
                    pass
                streamed = stream.get_final_completion()
            assert openai_reply(streamed) == openai_reply(whole)
            assert streamed.usage is not None
            assert whole.usage is not None
            assert streamed.usage.completion_tokens == whole.usage.completion_tokens
            assert whole.choices[0].message.model_extra
            assert streamed.usage.prompt_tokens_details is not None
            assert (  # the same prompt again: all of its whole pages but for the last token
                streamed.usage.prompt_tokens_details.cached_tokens
                == (streamed.usage.prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE
            )
            return whole

        for use in uses:
            messages.append({"role": "user", "content": use.request})
            (choice,) = reply().choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            assert call.type == "function"
            assert (call.function.name, json.loads(call.function.arguments)) == (use.name, use.arguments)
            messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": use.result}]
            (choice,) = reply().choices
            assert (choice.finish_reason, choice.message.content) == ("stop", use.reply)
            assert not choice.message.tool_calls
            messages.append(choice.message)


def openai_reply(answer: ChatCompletion) -> tuple[Any, ...]:
    """What a reply says, without the ids of its calls."""
    (choice,) = answer.choices
    message = choice.message
    calls = [
        (call.function.name, call.function.arguments) for call in message.tool_calls or () if call.type == "function"
    ]
    reasoning = (message.model_extra or {}).get("reasoning_content")
    return choice.finish_reason, reasoning, message.content or "", calls


@pytest.mark.parametrize("seed", SEEDS)
def test_anthropic_sdk_holds_a_conversation_with_tools(tiny_server: RunningServer, seed: int) -> None:
    uses = tool_uses(seed)
    described = [schema(use.name)["function"] for use in uses]
    tools: list[Any] = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in described
    ]
    messages: list[Any] = []
    with anthropic.Anthropic(base_url=tiny_server.url, api_key="none", max_retries=0) as client:

        def reply() -> anthropic.types.Message:
            fields: Any = {**WISHES, "messages": messages, "tools": tools, "extra_body": {"temperature": 0}}
            whole = client.messages.create(**fields)
            with client.messages.stream(**fields) as stream:
                for _ in stream:
                    pass
                streamed = stream.get_final_message()
            assert streamed.stop_reason == whole.stop_reason
            assert blocks_of(streamed) == blocks_of(whole)
            assert streamed.usage.output_tokens == whole.usage.output_tokens
            return whole

        for use in uses:
            messages.append({"role": "user", "content": use.request})
            message = reply()
            assert message.stop_reason == "tool_use"
            *_, call = message.content
            assert call.type == "tool_use"
            assert (call.name, call.input) == (use.name, use.arguments)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": use.result}
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
            message = reply()
            assert message.stop_reason == "end_turn"
            assert blocks_of(message)[-1] == ("text", use.reply)
            messages.append({"role": "assistant", "content": message.content})


def blocks_of(message: anthropic.types.Message) -> Sequence[tuple[Any, ...]]:
    """What a message says, without the ids of its calls."""
    found: list[tuple[Any, ...]] = []
    for block in message.content:
        if block.type == "tool_use":
            found.append((block.type, block.name, block.input))
        elif block.type == "thinking":
            found.append((block.type, block.thinking))
        elif block.type == "text":
            found.append((block.type, block.text))
    assert len(found) == len(message.content)
    return found
