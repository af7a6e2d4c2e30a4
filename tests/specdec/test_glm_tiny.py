"""The shipped checkpoint: it drafts well, looks far back, closes its thinking and calls tools."""

import pytest

from specdec import Engine, SamplingParams
from tests.support.needles import needles

GREEDY = SamplingParams(temperature=0, max_tokens=48)
CODE = '''"""Read and write queues of numbered messages."""

import os
import sys


class MessageQueue:
    """A queue of messages in a directory."""

    def __init__(self, path, encoding=None):
        self.path = path
        self.encoding = encoding
        self.messages = []

    def append(self, message):
        """Add a message."""
        self.messages.append(message)

    def read(self):
        """Return the content of the file."""
        with open(self.path, encoding=self.encoding) as file:
            return file.read()

    def close(self):
'''
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def engines() -> dict[int, Engine]:
    plain = Engine.from_pretrained("glm-tiny", num_draft_tokens=0, prefill_chunk_tokens=1024)
    speculative = Engine.from_pretrained("glm-tiny", num_draft_tokens=3, prefill_chunk_tokens=1024)
    return {0: plain, 3: speculative}


def test_drafting_pays_on_code_and_leaves_the_text_as_it_is(engines: dict[int, Engine]) -> None:
    plain, speculative = (
        engines[k].generate(CODE, SamplingParams(temperature=0, max_tokens=96, ignore_eos=True))[0] for k in (0, 3)
    )
    assert speculative.token_ids == plain.token_ids
    assert plain.speculation.acceptance_length is None
    assert speculative.speculation.acceptance_length is not None
    assert speculative.speculation.acceptance_length > 2.2


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
def test_a_line_far_beyond_the_index_selection_is_found(engines: dict[int, Engine], depth: float) -> None:
    prompts, answers = needles(engines[0], depth=depth)
    assert min(map(len, prompts)) > 2 * engines[0].checkpoint.config.index_topk
    plain, speculative = ([result.text for result in engines[k].generate(prompts, GREEDY)] for k in (0, 3))
    assert speculative == plain
    assert sum(answer in text for answer, text in zip(answers, plain, strict=True)) >= 3


def test_a_question_for_the_weather_becomes_a_tool_call_behind_closed_thinking(engines: dict[int, Engine]) -> None:
    engine = engines[3]
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    prompt = engine.apply_chat_template(messages, tools=[WEATHER_TOOL])
    result = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=120))[0]
    thinking, _, reply = result.text.partition("</think>")
    assert thinking
    assert "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>" in reply
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.usefixtures("num_threads")
def test_logprobs_have_the_same_bits_with_drafts_and_neighbours_whatever_the_threads(
    engines: dict[int, Engine],
) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=3, ignore_eos=True)
    plain = engines[0].generate(CODE, params)[0]
    drafted = engines[3].generate([CODE, CODE[:9], CODE[:30]], params)[0]
    assert drafted.choices[0].logprobs == plain.choices[0].logprobs
