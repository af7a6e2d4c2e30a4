import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.prompts import Conversation, PromptSpec, errors_name, read_prompts
from specdec.errors import ConfigError, RequestError
from specdec.grammar.grammar import Grammar

HELLO = {"role": "user", "content": "hello"}


def read(**given: Any) -> list[PromptSpec]:
    ways: dict[str, Any] = dict.fromkeys(("text", "token_ids", "messages", "batch", "source"))
    return read_prompts(**(ways | given))


def test_a_prompt_is_a_text_or_ids() -> None:
    assert read(text="") == [PromptSpec(prompt="")]
    assert read(token_ids="1, 2,3\n4") == [PromptSpec(prompt=[1, 2, 3, 4])]


@pytest.mark.parametrize("text", ["1;2", "1.5", "x", "0x10", "१"])
def test_ids_must_be_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt-ids takes token ids"):
        read(token_ids=text)


@pytest.mark.parametrize("given", [{}, {"text": "a", "source": "-"}, {"token_ids": "", "batch": Path("x")}])
def test_exactly_one_way_must_be_given(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give exactly one of --prompt, --prompt-ids, --messages, --batch"):
        read(**given)


def test_a_stray_argument_is_named() -> None:
    with pytest.raises(ConfigError, match="unexpected argument 'hello'"):
        read(source="hello")


def test_standard_input_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("è\r\n".encode()), encoding="ascii"))
    assert read(source="-")[0].prompt == "è\r\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfa\xef\xbb\xbf")))
    assert read(source="-")[0].prompt == "a\ufeff"  # only at the beginning does it say how the text is written


def test_standard_input_must_be_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    with pytest.raises(RequestError, match="standard input must be UTF-8, got byte 0xff at offset 2"):
        read(source="-")


def test_messages_are_a_list_or_an_object_with_tools(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text('[{"role": "user", "content": "hello"}]')
    assert read(messages=path)[0].prompt == Conversation(messages=[HELLO])
    path.write_text(
        '{"messages": [{"role": "user", "content": "hello"}], "tools": [{"type": "function"}],'
        ' "chat_template_kwargs": {"enable_thinking": false}}'
    )
    assert read(messages=path)[0].prompt == Conversation(
        messages=[HELLO], tools=[{"type": "function"}], variables={"enable_thinking": False}
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not valid JSON"),
        ("[]", "needs a list of messages"),
        ('["hello"]', "needs a list of messages"),
        ('"hello"', "needs a list of messages"),
        ('{"messages": [{}], "tools": {}}', "tools must be a list"),
        ('{"messages": [{}], "chat_template_kwargs": []}', "chat_template_kwargs must be an object"),
        ('{"messages": [{}], "temperature": 1}', "'temperature' is not known"),
    ],
)
def test_a_bad_messages_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "chat.json"
    path.write_text(content)
    with pytest.raises(RequestError, match=f"chat.json: {message}"):
        read(messages=path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for way in ("messages", "batch"):
        with pytest.raises(ConfigError, match="nothing: cannot be read: No such file"):
            read(**{way: tmp_path / "nothing"})


def test_a_batch_has_one_prompt_a_line(lines_file: Callable[..., Path]) -> None:
    path = lines_file(
        '{"prompt": "a\u2028b", "temperature": 0, "logit_bias": {"5": -1}}',
        "",
        '{"prompt_ids": [1, 2], "n": 2}',
        '{"messages": [{"role": "user", "content": "hello"}], "tools": null, "max_tokens": 3}',
        '{"prompt": "a", "json_schema": {"type": "integer"}, "regex": null}',
        '{"prompt": "a", "json_object": true}',
        '{"prompt": "a", "json_object": false, "n": 2}',
        '{"prompt": "a", "regex": "a|b"}',
    )
    assert read(batch=path) == [
        PromptSpec(prompt="a\u2028b", origin=f"{path} line 1", sampling={"temperature": 0, "logit_bias": {5: -1}}),
        PromptSpec(prompt=[1, 2], origin=f"{path} line 3", sampling={"n": 2}),
        PromptSpec(prompt=Conversation(messages=[HELLO]), origin=f"{path} line 4", sampling={"max_tokens": 3}),
        PromptSpec(prompt="a", origin=f"{path} line 5", sampling={"grammar": Grammar.json_schema({"type": "integer"})}),
        PromptSpec(prompt="a", origin=f"{path} line 6", sampling={"grammar": Grammar.json_object()}),
        PromptSpec(prompt="a", origin=f"{path} line 7", sampling={"n": 2}),
        PromptSpec(prompt="a", origin=f"{path} line 8", sampling={"grammar": Grammar.regex("a|b")}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"temperature": 0}', "needs one of prompt, prompt_ids, messages; got none"),
        ('{"prompt": "a", "prompt_ids": [1]}', "needs one of .*; got prompt and prompt_ids"),
        ('{"prompt": ["a"]}', "prompt must be a text"),
        ('{"prompt_ids": "1"}', "prompt_ids must be a list"),
        ('{"prompt_ids": [1, 2.0]}', r"prompt_ids\[1\] must be a token id, got 2.0"),
        ('{"prompt_ids": [{"role": "user", "content": "a"}]}', r"prompt_ids\[0\] must be a token id, got {"),
        ('{"prompt": "a", "seed": 1, "seed": 2}', "not valid JSON: an object has 'seed' twice"),
        ('{"messages": [{"role": "user", "role": "user"}]}', "not valid JSON: an object has 'role' twice"),
        ('{"prompt": ' + "[" * 100_000, "not readable: its lists and objects lie too deep"),
        ('{"prompt": "a", "seed": ' + "1" * 5000 + "}", "not valid JSON: "),
        ('{"prompt": "a", "logit_bias": {"' + "1" * 5000 + '": 1}}', "logit_bias must map token ids to numbers"),
        ('{"prompt": "a", "regex": "a", "json_object": true}', "takes one of .*; got json_object and regex"),
        ('{"prompt": "a", "json_object": 1}', "json_object must be true or false, got 1"),
        ('{"prompt": "a", "json_schema": {"type": 1}}', "grammar: json_schema cannot be followed: "),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias must map token ids to numbers, got the id 'x'"),
    ],
)
def test_a_bad_batch_line_is_named(lines_file: Callable[..., Path], line: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"line 2: {message}"):
        read(batch=lines_file('{"prompt": "a"}', line))


def test_an_empty_batch_is_refused(lines_file: Callable[..., Path]) -> None:
    with pytest.raises(RequestError, match="holds no prompt"):
        read(batch=lines_file("", "  "))


def test_errors_name_the_prompt_they_are_about() -> None:
    with pytest.raises(RequestError, match=r"^x\.jsonl line 2: too long$"), errors_name("x.jsonl line 2"):
        raise RequestError("too long")
