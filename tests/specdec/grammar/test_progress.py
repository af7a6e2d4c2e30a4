"""Which part of its reply each row draws for, against a reading token by token."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.grammar.definition import regex_definition
from specdec.grammar.progress import GrammarProgress
from tests.support.grammars import MARKER_IDS, allowed, vocabulary

END_THINK, END = MARKER_IDS
A, B = ord("a"), ord("b")


def progress_of(*, starts_in_reasoning: bool) -> GrammarProgress:
    return GrammarProgress(
        vocabulary().matcher(regex_definition("(a|b)*")),
        end_ids=[END, ord("!")],
        reasoning_end_id=END_THINK if starts_in_reasoning else None,
        foreign_ids=[ord("?")],
    )


def parts_by_definition(token_ids: Sequence[int], *, starts_in_reasoning: bool) -> list[str]:
    """The part of the row after each beginning of the reply."""
    parts = ["reasoning" if starts_in_reasoning else "grammar"]
    for token_id in token_ids:
        part = parts[-1]
        if part == "reasoning" and token_id == END_THINK:
            part = "grammar"
        elif part == "grammar" and token_id in (END, ord("!")):
            part = "ended"
        parts.append(part)
    return parts


replies = st.lists(st.sampled_from((A, B, A, B, END_THINK, END, ord("!"), ord("?"))), max_size=12)


@given(reply=replies, num_emitted=st.integers(0, 12), starts_in_reasoning=st.booleans())
def test_rows_are_told_apart_wherever_the_run_begins(
    reply: list[int], num_emitted: int, starts_in_reasoning: bool
) -> None:
    emitted, drafts = reply[:num_emitted], reply[num_emitted:]
    progress = progress_of(starts_in_reasoning=starts_in_reasoning)
    progress.observe(emitted[: len(emitted) // 2])
    progress.observe(emitted[len(emitted) // 2 :])
    found = progress.parts_of(drafts)
    names = ["reasoning"] * found.num_reasoning + ["grammar"] * found.num_grammar + ["ended"] * found.num_ended
    parts = parts_by_definition(reply, starts_in_reasoning=starts_in_reasoning)
    assert names == parts[len(emitted) :]
    assert list(found.draft_ids) == [
        token_id
        for place, token_id in enumerate(reply)
        if place >= len(emitted) and parts[place] == "grammar" and parts[place + 1] == "grammar"
    ]


@pytest.mark.parametrize("num_tokens", range(6))
def test_grammar_begins_behind_the_reasoning_wherever_that_ends_in_a_run(num_tokens: int) -> None:
    thought, text = [B, ord("?"), A, A, A][:num_tokens], [A, B]
    for border in range(num_tokens + 1 + len(text)):
        progress = progress_of(starts_in_reasoning=True)
        reply = [*thought, END_THINK, *text]
        progress.observe(reply[:border])
        progress.observe(reply[border:])
        assert allowed(progress.matcher)[0, [A, B]].all()
        assert progress.parts_of([]).num_grammar == 1
        progress.observe([END])
        assert progress.parts_of([]).num_ended == 1


def test_ids_that_end_a_text_or_a_reasoning_otherwise_are_early_ones() -> None:
    assert progress_of(starts_in_reasoning=True).early_ids == {END, ord("!"), ord("?")}
    ending = GrammarProgress(
        vocabulary().matcher(regex_definition("a")), end_ids=[END, END_THINK], reasoning_end_id=END_THINK
    )
    assert ending.early_ids == {END}


def test_another_reply_begins_anew() -> None:
    progress = progress_of(starts_in_reasoning=True)
    progress.observe([A, END_THINK, A, END])
    other = progress.restart()
    assert other.parts_of([]).num_reasoning == 1
    other.observe([END_THINK])
    assert allowed(other.matcher)[0, [A, B]].all()
    assert progress.parts_of([]).num_ended == 1
