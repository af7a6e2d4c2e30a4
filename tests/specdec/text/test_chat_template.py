"""Rendering against transformers on the same template, and what goes wrong."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.errors import CheckpointError, RequestError
from specdec.text.chat_template import ChatTemplate, load_chat_template

TEMPLATE = """\
[gMASK]<sop>
{%- if tools %}
<|system|>You may call:
<tools>
{% for tool in tools %}
{{ tool.function | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>
{%- endif %}
{# only the last question decides which reasoning is kept #}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages | reverse %}
    {%- if message.role == 'user' %}
        {%- set ns.last_user = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}<|system|>{{ message.content }}
    {%- elif message.role == 'user' %}<|user|>{{ message.content | trim }}
    {%- elif message.role == 'assistant' %}<|assistant|>
        {%- if message.reasoning_content is string and loop.index0 > ns.last_user -%}
            <think>{{ message.reasoning_content.strip() }}</think>
        {%- else -%}
            <think></think>
        {%- endif %}
        {{- message.content if message.content is string else '' }}
        {%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
            {%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>
            {%- endfor -%}
</tool_call>
        {%- endfor %}
    {%- elif message.role == 'tool' %}<|observation|><tool_response>{{ message.content }}</tool_response>
    {%- else %}{{ raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '<think></think>' if enable_thinking is false else '<think>' }}
{%- endif %}"""

WETTER = {"name": "wetter", "description": 'Größe & "Wind" <in> 東京', "parameters": {"b": 1, "a": [1.5, None]}}
TOOLS = [{"type": "function", "function": WETTER}]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "  Wie wird's in 東京? <b>\n"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": " ask the tool ",
        "tool_calls": [{"function": {"name": "wetter", "arguments": {"stadt": "東京", "tage": 3, "teile": ["ä"]}}}],
    },
    {"role": "tool", "content": "22°"},
    {"role": "assistant", "content": "22 Grad.", "reasoning": "old"},
    {"role": "user", "content": "Danke"},
    {"role": "assistant", "content": "Gern", "reasoning_content": "polite", "tool_calls": None},
]


def template(source: str = TEMPLATE, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, origin="chat_template.jinja", special_tokens=special_tokens)


def by_transformers(source: str, messages: Sequence[Any], tools: Sequence[Any] | None, **variables: Any) -> str:
    rendered: Any = render_jinja_template(
        conversations=[list(messages)], tools=None if tools is None else list(tools), chat_template=source, **variables
    )
    return str(rendered[0][0])


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("num_messages", range(1, len(TALK) + 1))
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_prompts_are_those_of_transformers(
    tools: list[dict[str, Any]] | None, num_messages: int, variables: dict[str, Any], add_generation_prompt: bool
) -> None:
    messages = TALK[:num_messages]
    rendered = template().render(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
    )
    assert rendered == by_transformers(
        TEMPLATE, messages, tools, add_generation_prompt=add_generation_prompt, **variables
    )


def test_the_template_reads_as_intended() -> None:
    rendered = template().render(TALK[1:3], tools=TOOLS)
    assert rendered == (
        "[gMASK]<sop><|system|>You may call:\n<tools>\n"
        '{"name": "wetter", "description": "Größe & \\"Wind\\" <in> 東京", "parameters": {"b": 1, "a": [1.5, null]}}\n'
        "</tools><|user|>Wie wird's in 東京? <b><|assistant|><think>ask the tool</think>"
        "<tool_call>wetter<arg_key>stadt</arg_key><arg_value>東京</arg_value><arg_key>tage</arg_key>"
        '<arg_value>3</arg_value><arg_key>teile</arg_key><arg_value>["ä"]</arg_value></tool_call>'
        "<|assistant|><think>"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0] | tojson }}",
        "{{ messages[0] | tojson(ensure_ascii=True) }}",
        "{{ messages[0] | tojson(indent=2, sort_keys=True) }}",
        "{{ messages[0] | tojson(separators=(',', ':')) }}",
        "{% for m in messages %}{% if loop.index0 is odd %}{% continue %}{% endif %}{{ m.role }}\n{% endfor %}end",
        "  {% if true %}\n  x\n  {% endif %}\n",
        "{{ tools is none }} {{ unknown is defined }} {{ documents is defined }}",
        "{% set x = dict(a=1) %}{{ x.items() | list }} {{ 'ab'.upper() }} {{ [3, 1] | sort }}",
    ],
)
def test_filters_and_whitespace_are_those_of_transformers(source: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "ä<&>'", "b": [1, {"z": None}]},
        {"role": "x"},
        {"role": "y"},
    ]
    rendered = template(source).render(messages)
    if "documents" in source:  # transformers always passes them; here they are a variable like any other
        assert rendered == "True False False"
    else:
        assert rendered == by_transformers(source, messages, None, add_generation_prompt=True)


def test_the_clock_is_available() -> None:
    assert template("{{ strftime_now('%Y') | int > 2000 }}").render([]) == "True"


def test_what_a_template_can_be_told_is_read_off_its_text() -> None:
    assert template().variables == {"messages", "tools", "add_generation_prompt", "enable_thinking"}
    assert template().mentions("enable_thinking")
    assert not template("{# enable_thinking #}{{ messages }}").mentions("enable_thinking")


def test_special_tokens_are_variables() -> None:
    assert template("{{ eos_token }}", eos_token="<|endoftext|>").render([]) == "<|endoftext|>"


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('two systems') }}", "two systems"),
        ("{{ messages[0].content.foo.bar }}", "undefined|attribute"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ cycler.__init__.__globals__ }}", "__init__"),
    ],
)
def test_whatever_a_template_cannot_render_is_a_refused_request(source: str, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        template(source).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([{"content": "x"}], r"messages\[0\] must be an object with a role"),
        ([{"role": "user"}, "hello"], r"messages\[1\]"),
        ([{"role": "user", "content": {1, 2}}], "plain JSON"),
        ([{"role": "user", "content": object()}], "plain JSON"),
    ],
)
def test_messages_must_be_json_objects_with_a_role(messages: list[Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        template().render(messages)


def with_arguments(arguments: Any) -> list[dict[str, Any]]:
    calls = [{"function": {"name": "wetter", "arguments": arguments}}]
    return [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]


@pytest.mark.parametrize(
    ("text", "arguments"), [('{"stadt": "東京", "tage": [3]}', {"stadt": "東京", "tage": [3]}), ("", {}), (None, {})]
)
def test_arguments_of_a_tool_call_may_be_json_text(text: str | None, arguments: dict[str, Any]) -> None:
    assert template().render(with_arguments(text)) == template().render(with_arguments(arguments))


@pytest.mark.parametrize("arguments", ["{", '"東京"', "[1]", 3, "[" * 100_000])
def test_arguments_that_are_no_object_are_refused_with_their_place(arguments: Any) -> None:
    with pytest.raises(RequestError, match=r"^messages\[1\]\.tool_calls\[0\]: arguments must be a JSON object"):
        template().render(with_arguments(arguments))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"messages": None}, "messages must be a list of objects, got None"),
        ({"messages": 5}, "messages must be a list of objects, got 5"),
        ({"messages": "hello"}, "messages must be a list of objects, got 'hello'"),
        ({"tools": 5}, "tools must be a list of objects, got 5"),
        ({"tools": "abc"}, "tools must be a list of objects, got 'abc'"),
        ({"tools": [1]}, r"tools\[0\] must be an object, got 1"),
        ({"variables": [1]}, r"variables must be an object, got \[1\]"),
    ],
)
def test_what_is_no_conversation_is_refused_by_the_part_that_is_wrong(given: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        template().render(**{"messages": TALK, **given})


def test_a_failure_without_a_text_is_named_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any, **_settings: Any) -> str:
        raise MemoryError

    monkeypatch.setattr(jinja2.Template, "render", fail)
    with pytest.raises(RequestError, match=r"cannot render these messages: MemoryError$"):
        template().render([])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "eos_token"])
def test_variables_cannot_replace_what_the_engine_gives(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        template(eos_token="x").render(TALK, variables={name: "y"})


def test_the_given_messages_are_not_changed() -> None:
    before = json.dumps(TALK)
    template().render(TALK)
    assert json.dumps(TALK) == before


def test_a_template_of_its_own_file_goes_before_the_one_of_the_tokenizer(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    config: dict[str, Any] = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": None, "pad_token": "<pad>"}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    assert load_chat_template(tmp_path) is None
    for chat_template in (
        "a {{ eos_token }}",
        [{"name": "other", "template": "b"}, {"name": "default", "template": "a {{ eos_token }}"}],
    ):
        path.write_text(json.dumps({**config, "chat_template": chat_template}))
        found = load_chat_template(tmp_path)
        assert found is not None
        assert found.render([]) == "a <|endoftext|>"
    (tmp_path / "chat_template.jinja").write_text("own {{ pad_token }}")
    found = load_chat_template(tmp_path)
    assert found is not None
    assert found.render([]) == "own <pad>"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"{% if %}"),
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
        ("tokenizer_config.json", b'{"chat_template": "{{"}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": [1], "template": "x"}]}'),
        ("tokenizer_config.json", b'{"a":' * 100_000),
    ],
)
def test_a_corrupt_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_chat_template(tmp_path)
