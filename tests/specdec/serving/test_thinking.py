"""What the templates of the GLM versions make of wishes about thinking."""

from typing import Any

import pytest

from specdec.serving.api_errors import ApiError
from specdec.serving.thinking import ThinkingRules, ThinkingWish
from specdec.text.chat_template import ChatTemplate

TURN = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
# The parts of the released templates that decide, in words of our own.
GLM_5 = TURN + "{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}"
GLM_5_2 = (
    "{% if enable_thinking is not defined or enable_thinking %}"
    "Effort: {{ 'High' if reasoning_effort == 'high' else 'Max' }}{% endif %}" + GLM_5
)
GLM_5_3 = (
    "Effort: {{ reasoning_effort | capitalize if reasoning_effort in ['low', 'high'] else 'Max' }}" + TURN + "<think>"
)
NO_WISHES = TURN


def rules(source: str) -> ThinkingRules:
    return ThinkingRules(ChatTemplate(source, origin="test", special_tokens={}))


@pytest.mark.parametrize(
    ("source", "can_switch", "efforts"),
    [(GLM_5, True, ()), (GLM_5_2, True, ("high",)), (GLM_5_3, False, ("low", "high")), (NO_WISHES, False, ())],
)
def test_template_says_what_can_be_told(source: str, can_switch: bool, efforts: tuple[str, ...]) -> None:
    found = rules(source)
    assert (found.can_switch, found.efforts) == (can_switch, efforts)


@pytest.mark.parametrize(
    ("source", "wish", "variables", "without_effect"),
    [
        (GLM_5, ThinkingWish(), {}, []),
        (GLM_5, ThinkingWish(False), {"enable_thinking": False}, []),
        (GLM_5, ThinkingWish(True, "low"), {"enable_thinking": True}, ["reasoning_effort"]),
        (GLM_5, ThinkingWish(None, "none"), {"enable_thinking": False}, []),
        (GLM_5, ThinkingWish(False, "none"), {"enable_thinking": False}, []),
        (GLM_5_2, ThinkingWish(None, "minimal"), {"reasoning_effort": "high"}, []),
        (GLM_5_2, ThinkingWish(None, "medium"), {"reasoning_effort": "high"}, []),
        (GLM_5_2, ThinkingWish(None, "high"), {"reasoning_effort": "high"}, []),
        (GLM_5_2, ThinkingWish(None, "xhigh"), {"reasoning_effort": "xhigh"}, []),
        (GLM_5_2, ThinkingWish(None, "max"), {"reasoning_effort": "max"}, []),
        (GLM_5_3, ThinkingWish(False), {}, ["enable_thinking"]),
        (GLM_5_3, ThinkingWish(None, "none"), {}, ["reasoning_effort"]),
        (GLM_5_3, ThinkingWish(None, "minimal"), {"reasoning_effort": "low"}, []),
        (GLM_5_3, ThinkingWish(None, "medium"), {"reasoning_effort": "high"}, []),
        (NO_WISHES, ThinkingWish(True, "high"), {}, ["reasoning_effort", "enable_thinking"]),
        (GLM_5, ThinkingWish(None, None, {"clear_thinking": True}), {"clear_thinking": True}, []),
        (GLM_5, ThinkingWish(False, None, {"enable_thinking": False}), {"enable_thinking": False}, []),
    ],
)
def test_wishes_become_variables_that_the_template_reads(
    source: str, wish: ThinkingWish, variables: dict[str, Any], without_effect: list[str]
) -> None:
    assert rules(source).variables(wish) == (variables, without_effect)


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        (ThinkingWish(None, "enormous"), "reasoning_effort"),
        (ThinkingWish(True, "none"), "reasoning_effort"),
        (ThinkingWish(True, None, {"enable_thinking": False}), "enable_thinking"),
        (ThinkingWish(None, "high", {"reasoning_effort": "low"}), "reasoning_effort"),
    ],
)
def test_contradictions_are_refused(wish: ThinkingWish, param: str) -> None:
    with pytest.raises(ApiError) as refusal:
        rules(GLM_5_2).variables(wish)
    assert (refusal.value.status, refusal.value.param) == (400, param)


def test_template_that_fails_on_an_effort_does_not_know_it() -> None:
    source = "{% if reasoning_effort == 'low' %}{{ raise_exception('never') }}{% endif %}" + TURN
    assert rules(source).efforts == ()
