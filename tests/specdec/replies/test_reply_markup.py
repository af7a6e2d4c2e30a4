"""Which tokens are markers, and where a reply begins after each shape of prompt."""

from pathlib import Path
from typing import Any

import pytest

from specdec.models.glm.released import locate_checkpoint
from specdec.replies.reply_markup import Marker, ReplyMarkup
from specdec.text.chat_template import load_chat_template
from specdec.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import write_tokenizer
from tests.support.replies import glm_tiny_markup, parsed


def test_the_markers_of_glm_are_found_by_their_tokens() -> None:
    markup = glm_tiny_markup()
    assert markup.has_reasoning
    assert markup.has_tool_calls
    for marker, token_id in markup.id_by_marker.items():
        assert markup.tokenizer.token_bytes(token_id) == marker.value.encode()
        assert markup.marker_by_id[token_id] is marker
    assert set(markup.id_by_marker) == set(Marker) - {Marker.SPECIAL}


def test_ends_of_a_turn_are_special_whatever_the_tokenizer_says() -> None:
    tokenizer = glm_tiny_markup().tokenizer
    assert ReplyMarkup.of(tokenizer, end_ids=(65,)).marker_by_id[65] is Marker.SPECIAL
    assert 65 not in ReplyMarkup.of(tokenizer).marker_by_id


def test_a_tokenizer_without_call_markers_gives_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")  # it has markers of reasoning, and <tool_call> alone
    markup = ReplyMarkup.of(Tokenizer(tmp_path / "tokenizer.json"))
    assert markup.has_reasoning
    assert not markup.has_tool_calls
    text = "a</think>b<tool_call>c<arg_key>d</arg_key></tool_call>"
    reply = parsed([(markup.tokenizer.encode(text), text)], markup=markup, starts_in_reasoning=True)
    assert (reply.reasoning, reply.content, reply.calls) == ("a", text.removeprefix("a</think>"), ())


def test_a_tokenizer_without_markers_gives_text_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path)
    path.write_text(path.read_text().replace("<think>", "<thunk>").replace("<tool_call>", "<tool_coll>"))
    markup = ReplyMarkup.of(Tokenizer(path))
    assert not markup.id_by_marker
    text = " <think>a</think>\n"
    ids = markup.tokenizer.encode(text)
    assert not markup.starts_in_reasoning(ids)
    reply = parsed([(ids, text)], markup=markup, starts_in_reasoning=True)
    assert (reply.reasoning, reply.content, reply.num_reasoning_tokens) == ("", text, 0)


@pytest.mark.parametrize(
    ("prompt", "is_inside"),
    [
        ("[gMASK]<sop><|user|>Q<|assistant|><think>", True),
        ("[gMASK]<sop><|user|>Q<|assistant|></think>", False),  # GLM-5 and 5.1 without thinking
        ("[gMASK]<sop><|user|>Q<|assistant|><think></think>", False),  # 5.2 without thinking
        ("[gMASK]<sop><|user|>Q<|assistant|>", False),
        ("[gMASK]<sop><|user|>Q <think> and <|assistant|>", False),
        ("[gMASK]<sop><|user|>Q</think><|assistant|><think>\n", True),
        ("<|user|>Q<|assistant|><think>a</think>b<|observation|>c<|assistant|><think>", True),
        ("<|user|>Q<|assistant|><think>a</think>b", False),
        ("<|user|>Q<|assistant|><think>a beginning", True),
        ("<think> a text", True),
        ("a text", False),
        ("", False),
    ],
)  # fmt: skip
def test_the_tail_of_a_prompt_says_whether_its_reply_begins_inside_the_reasoning(prompt: str, is_inside: bool) -> None:
    markup = glm_tiny_markup()
    assert markup.starts_in_reasoning(markup.tokenizer.encode(prompt)) == is_inside


@pytest.mark.parametrize(
    ("variables", "is_inside"), [({}, True), ({"enable_thinking": True}, True), ({"enable_thinking": False}, False)]
)
def test_the_template_of_glm_tiny_opens_the_reasoning_unless_told_not_to(
    variables: dict[str, Any], is_inside: bool
) -> None:
    template = load_chat_template(locate_checkpoint("glm-tiny"))
    assert template is not None
    talk = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
        {"role": "user", "content": "<think>"},
    ]
    markup = glm_tiny_markup()
    prompt = template.render(talk, variables=variables)
    assert markup.starts_in_reasoning(markup.tokenizer.encode(prompt)) == is_inside
