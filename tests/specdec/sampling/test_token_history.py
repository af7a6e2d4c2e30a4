"""The counts of penalties against a plain count of the tokens."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from specdec.sampling.token_history import SeenTokens, TokenHistory

token_lists = st.lists(st.integers(0, 6), max_size=8)


def as_dict(seen: SeenTokens) -> dict[int, float]:
    ids = seen.token_id_N.tolist()
    assert len(ids) == len(set(ids))
    return dict(zip(ids, seen.output_count_N.tolist(), strict=True))


@given(prompt=token_lists, runs=st.lists(token_lists, max_size=4), drafts=token_lists)
def test_history_after_each_draft_counts_prompt_output_and_those_drafts(
    prompt: list[int], runs: list[list[int]], drafts: list[int]
) -> None:
    history = TokenHistory(prompt)
    for run in runs:
        history.observe(run)
    output = [token_id for run in runs for token_id in run]
    for _ in range(2):  # looking ahead leaves no trace
        for count, seen in enumerate(history.after_drafts(drafts, range(len(drafts) + 1))):
            expected = dict.fromkeys(prompt, 0) | Counter(output + drafts[:count])
            assert as_dict(seen) == expected


def test_only_the_asked_draft_counts_are_given() -> None:
    history = TokenHistory([1])
    assert [as_dict(seen) for seen in history.after_drafts([2, 3], [1])] == [{1: 0, 2: 1}]
