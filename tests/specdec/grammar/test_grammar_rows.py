"""The masks of a verify, against replies that are asked one by one and token by token."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.grammar.definition import json_schema_definition, regex_definition
from specdec.grammar.grammar_rows import GrammarRows, grammar_rows
from specdec.grammar.progress import GrammarProgress
from specdec.kernels.logits_transform import LogitsRules, TokenBans, transform_logits
from tests.support.grammars import MARKER_IDS, PIECES, VOCAB_SIZE, allowed, vocabulary

END_THINK, END = MARKER_IDS
DEFINITIONS = (
    regex_definition("(ab|b)*c"),
    regex_definition("[ab]{2,3}"),
    json_schema_definition('{"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2}'),
)
CPU = torch.device("cpu")


def progress_of(kind: int, *, starts_in_reasoning: bool, end_ids: tuple[int, ...] = (END, ord("c"))) -> GrammarProgress:
    return GrammarProgress(
        vocabulary().matcher(DEFINITIONS[kind]),
        end_ids=end_ids,
        reasoning_end_id=END_THINK if starts_in_reasoning else None,
        foreign_ids=[ord("?")],
    )


def mask_of(progress: GrammarProgress) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """What a reply may draw next, read off its parts: bool [VOCAB_SIZE]."""
    parts = progress.parts_of([])
    mask_V = np.zeros(VOCAB_SIZE, dtype=np.bool_)
    ends = sorted(progress.end_ids)
    if parts.num_reasoning:
        mask_V[:] = True
        mask_V[[*ends, ord("?")]] = False
    elif parts.num_grammar:
        allowed_V = allowed(progress.matcher)[0]
        mask_V[:] = allowed_V[:-1]
        mask_V[ends] = allowed_V[-1]
    else:
        mask_V[ends] = True
    return mask_V


def masks_in(rows: GrammarRows, num_rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """What the rows let through of logits: bool [T, VOCAB_SIZE]."""
    rules = rows.restrict(LogitsRules(), device=CPU)
    return transform_logits(torch.zeros(num_rows, VOCAB_SIZE), rules).isfinite().numpy()


USED = (
    ord("a"),
    ord("b"),
    ord("c"),
    ord("["),
    ord("]"),
    ord('"'),
    ord(","),
    PIECES.index(b"ab"),
    *MARKER_IDS,
    ord("?"),
)
replies = st.tuples(
    st.integers(0, 2),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=8),  # which of the tokens allowed, for those emitted
    st.lists(st.one_of(st.sampled_from(USED), st.integers(-9, -1)), max_size=6),  # drafts; a negative one is allowed
)


@settings(max_examples=80)
@given(asked=st.lists(st.one_of(st.none(), replies), min_size=1, max_size=4))
def test_rows_that_can_be_reached_are_those_of_a_reading_token_by_token(
    asked: list[tuple[int, bool, list[int], list[int]] | None],
) -> None:
    progress_F: list[GrammarProgress | None] = []
    drafts: list[list[int]] = []
    expected: list[list[np.ndarray[tuple[int], np.dtype[np.bool_]] | None]] = []
    for each in asked:
        if each is None:
            progress_F.append(None)
            drafts.append([1, 2])
            expected.append([np.ones(VOCAB_SIZE, dtype=np.bool_)] * 3)
            continue
        kind, starts_in_reasoning, emitted, proposed = each
        progress = progress_of(kind, starts_in_reasoning=starts_in_reasoning)
        reader = progress_of(kind, starts_in_reasoning=starts_in_reasoning)
        for choice in emitted:
            ids = np.flatnonzero(mask_of(reader))
            token_id = int(ids[choice * len(ids) // 10])
            progress.observe([token_id])
            reader.observe([token_id])
        drafts.append([])
        masks: list[np.ndarray[tuple[int], np.dtype[np.bool_]] | None] = [mask_of(reader)]
        for draft in proposed:
            if masks[-1] is None:
                drafts[-1].append(max(draft, 0))
                masks.append(None)
                continue
            ids = np.flatnonzero(masks[-1])
            token_id = draft if draft >= 0 else int(ids[-draft % len(ids)])
            drafts[-1].append(token_id)
            if masks[-1][token_id]:
                reader.observe([token_id])
                masks.append(mask_of(reader))
            else:
                masks.append(None)  # no reply comes here
        progress_F.append(progress)
        expected.append(masks)

    rows = grammar_rows(progress_F, drafts)
    again = grammar_rows(progress_F, drafts)
    if all(progress is None for progress in progress_F):
        assert rows is None
        return
    assert rows is not None
    assert again is not None
    assert len(set(rows.row_R.tolist())) == len(rows.row_R)
    assert (rows.bits_MX[rows.mask_R] == again.bits_MX[again.mask_R]).all()  # looking leaves no trace
    found_TV = masks_in(rows, sum(map(len, expected)))
    for found_V, mask_V in zip(found_TV, [mask for masks in expected for mask in masks], strict=True):
        assert mask_V is None or (found_V == mask_V).all()


def test_rows_behind_a_forbidden_draft_are_left_out() -> None:
    rows = grammar_rows([progress_of(0, starts_in_reasoning=False)], [[ord("b"), ord("x"), ord("b")]])
    assert rows is not None
    assert rows.row_R.tolist() == [0, 1]
    assert len(rows.mask_R) == 2
    assert len(rows.banned_row_N) == 0


def test_equal_masks_travel_once() -> None:
    progress_F = [progress_of(0, starts_in_reasoning=False) for _ in range(5)]
    rows = grammar_rows(progress_F, [[ord("b"), ord("b")]] * 5)
    assert rows is not None
    assert rows.row_R.tolist() == list(range(15))
    assert len(rows.bits_MX) == 1  # after any number of b the same may follow
    assert rows.mask_R.tolist() == [0] * 15


def test_rows_in_the_reasoning_only_ban_what_ends_it_otherwise() -> None:
    rows = grammar_rows([progress_of(0, starts_in_reasoning=True)], [[ord("x"), END_THINK]])
    assert rows is not None
    assert rows.row_R.tolist() == [2]
    assert rows.banned_row_N.tolist() == [0, 0, 0, 1, 1, 1]
    assert rows.banned_id_N.tolist() == [ord("?"), ord("c"), END] * 2


def test_constraints_join_what_else_is_banned() -> None:
    rows = grammar_rows([progress_of(0, starts_in_reasoning=True)], [[END_THINK]])
    assert rows is not None
    bans = TokenBans(row_N=torch.tensor([0, 1]), token_id_N=torch.tensor([ord("x"), ord("b")]))
    rules = rows.restrict(LogitsRules(bans=bans), device=CPU)
    allowed_TV = transform_logits(torch.zeros(2, VOCAB_SIZE), rules).isfinite()
    assert (~allowed_TV[0]).nonzero()[:, 0].tolist() == [ord("?"), ord("c"), ord("x"), END]
    assert allowed_TV[1].nonzero()[:, 0].tolist() == [ord("a"), PIECES.index(b"ab")]


def test_ids_that_end_a_text_are_no_part_of_it() -> None:
    """An id that stops the reply is allowed where the text may end, though the grammar could go on with it."""
    progress = progress_of(1, starts_in_reasoning=False, end_ids=(END, ord("a")))
    mask_V = mask_of(progress)
    assert np.flatnonzero(mask_V).tolist() == [ord("b"), PIECES.index(b"ab")]
    progress.observe([ord("b"), ord("b")])
    rows = grammar_rows([progress], [[]])
    assert rows is not None
    assert np.flatnonzero(masks_in(rows, 1)[0]).tolist() == [ord("a"), ord("b"), END]
