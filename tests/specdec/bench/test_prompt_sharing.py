"""Prompts share tokens exactly where the trace says that they share blocks."""

import json
from collections.abc import Sequence
from itertools import combinations, pairwise, takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.bench.filler import Filler
from specdec.bench.prompt_writer import PromptForm, PromptWriter, ReplyContent
from specdec.bench.reusable_prefix import count_reusable_tokens
from specdec.bench.workload import Blocks, PlannedRequest, Session, Workload
from specdec.errors import ConfigError
from tests.specdec.bench.conftest import SAMPLES, ReadLines, read_sample

VOCABULARY = range(1000, 1600)


def written(workload: Workload, *, form: PromptForm = PromptForm.IDS, seed: int = 0) -> list[Any]:
    writer = PromptWriter(form, vocabulary=VOCABULARY, num_blocks=workload.num_blocks, seed=seed)
    prompts = []
    replies: dict[int, ReplyContent] = {}
    for request in workload.requests:
        prompts.append(next(iter(writer.write(request, replies).values())))
        replies[request.index] = ReplyContent(text=f"reply {request.index}", token_ids=None)
    return prompts


def num_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@pytest.mark.parametrize("scale", [1, 16])
def test_mooncake_prompts_have_as_many_tokens_in_common_as_their_blocks(scale: int) -> None:
    rows = [json.loads(line) for line in (SAMPLES / "mooncake_conversation.jsonl").read_text().splitlines()][:25]
    prompts = written(read_sample("mooncake_conversation", scale=scale))
    assert {1, 27} <= {num_common(first["hash_ids"], second["hash_ids"]) for first, second in combinations(rows, 2)}
    if scale == 1:
        assert [len(prompt) for prompt in prompts[:25]] == [row["input_length"] for row in rows]
    for (first, first_prompt), (second, second_prompt) in combinations(zip(rows, prompts, strict=False), 2):
        expected = num_common(first["hash_ids"], second["hash_ids"]) * 512 // scale
        shortest = min(len(first_prompt), len(second_prompt))
        found = num_common(first_prompt, second_prompt)
        assert min(expected, shortest) <= found <= min(expected + 1, shortest)  # by chance one more


def test_agent_sessions_share_within_a_session_and_not_between_them() -> None:
    sessions = [json.loads(line) for line in (SAMPLES / "agent_sessions.jsonl").read_text().splitlines()]
    prompts = written(read_sample("agent_sessions"))
    first, second = (session["requests"] for session in sessions)
    plain = [entry for entry in second if entry["type"] != "subagent"]
    assert [len(prompt) for prompt in prompts[:3]] == [entry["in"] for entry in first]
    assert num_common(prompts[1], prompts[2]) == 64 * num_common(first[1]["hash_ids"], first[2]["hash_ids"])
    assert num_common(prompts[0], prompts[3]) == 0  # the ids begin alike, in another session
    assert num_common(prompts[3], prompts[10]) == 64 * num_common(plain[0]["hash_ids"], plain[1]["hash_ids"])


def test_a_round_has_the_conversation_so_far_in_front() -> None:
    workload = read_sample("tracelab_sessions")
    requests = workload.sessions[0].requests
    writer = PromptWriter(PromptForm.IDS, vocabulary=VOCABULARY, num_blocks=workload.num_blocks, seed=0)
    replies = {
        request.index: ReplyContent(text="", token_ids=tuple(range(request.num_output_tokens))) for request in requests
    }
    prompts = [writer.write(request, replies)["prompt"] for request in requests]
    assert [len(prompt) for prompt in prompts] == [2318, 2518 + 348, 2997 + 812]
    assert prompts[1][: 2318 + 200] == prompts[0] + list(range(200))
    assert prompts[2][: 2518 + 348 + 131] == prompts[1] + list(range(131))


def test_filler_stands_in_for_replies_whose_ids_are_not_told() -> None:
    prompts = written(read_sample("tracelab_sessions"))
    assert [len(prompt) for prompt in prompts[:3]] == [2318, 2518 + 348, 2997 + 812]
    assert prompts[1][:2318] == prompts[0]
    assert prompts[2][: 2518 + 348] == prompts[1]


def test_a_shorter_prefix_cuts_the_conversation(read: ReadLines) -> None:
    def line(round_idx: int, prefix: int, new: int) -> str:
        fields = {"session_id": "a", "round_idx": round_idx, "prefix_len": prefix, "input_len": new, "output_len": 10}
        return json.dumps(fields)

    workload = read(line(0, 0, 40), line(1, 50, 8), line(2, 45, 9), line(3, 20, 7), line(4, 100, 5))
    prompts = written(workload)
    assert [len(prompt) for prompt in prompts] == [40, 58, 54, 27, 105]
    assert [num_common(a, b) for a, b in pairwise(prompts)] == [40, 45, 20, 27]
    # Of the last prompt the prefix is longer than the 37 tokens there are: filler follows.
    assert [request.num_prompt_tokens for request in workload.requests] == [40, 58, 54, 27, 105]


@given(
    ids=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=2, max_size=2),
    block_tokens=st.integers(1, 9),
    vocab_size=st.integers(2, 40),
    seed=st.integers(0, 2**63 - 1),
)
def test_different_blocks_differ_within_the_digits_of_their_numbers(
    ids: list[list[int]], block_tokens: int, vocab_size: int, seed: int
) -> None:
    filler = Filler(vocab_size=vocab_size, num_blocks=31, seed=seed)
    first, second = (
        filler.tokens(
            Blocks(block_numbers=tuple(numbers), block_tokens=block_tokens, num_tokens=len(numbers) * block_tokens)
        ).tolist()
        for numbers in ids
    )
    assert len(first) == len(ids[0]) * block_tokens
    assert all(0 <= token < vocab_size for token in first)
    shared = num_common(*ids) * block_tokens
    found = num_common(first, second)
    assert found >= shared
    if block_tokens >= filler.num_digits:
        assert found < shared + filler.num_digits or found == min(len(first), len(second)) == shared


def test_tokens_depend_on_seed_and_number_and_not_on_what_else_is_asked_for() -> None:
    def blocks(*numbers: int) -> Blocks:
        return Blocks(block_numbers=numbers, block_tokens=16, num_tokens=16 * len(numbers))

    filler = Filler(vocab_size=50, num_blocks=100, seed=3)
    assert filler.tokens(blocks(7, 8)).tolist() == filler.tokens(blocks(7)).tolist() + filler.tokens(blocks(8)).tolist()
    assert filler.tokens(blocks(7)).tolist() != Filler(vocab_size=50, num_blocks=100, seed=4).tokens(blocks(7)).tolist()
    assert (
        filler.tokens(Blocks(block_numbers=(7, 8), block_tokens=16, num_tokens=17)).tolist()
        == (filler.tokens(blocks(7, 8)).tolist()[:17])
    )
    first = {int(Filler(vocab_size=50, num_blocks=100, seed=seed).tokens(blocks(7))[0]) for seed in range(50)}
    assert len(first) > 20  # from the first token on


def test_one_token_is_no_vocabulary() -> None:
    with pytest.raises(ConfigError, match="at least 2 tokens, got 1"):
        Filler(vocab_size=1, num_blocks=1, seed=0)


def test_text_shares_as_ids_do() -> None:
    workload = read_sample("mooncake_conversation", scale=64)
    texts = written(workload, form=PromptForm.TEXT)
    for (first_ids, first), (second_ids, second) in combinations(zip(written(workload), texts, strict=True), 2):
        assert abs(num_common(first.split(), second.split()) - num_common(first_ids, second_ids)) <= 1
        assert len(first.split()) == len(first_ids)
    messages = written(workload, form=PromptForm.CHAT)
    assert messages[0] == [{"role": "user", "content": texts[0].strip()}]


def test_questions_are_conversations(read: ReadLines) -> None:
    workload = read('{"question_id": 1, "category": "math", "turns": ["What is 2?", "And 3?"]}', num_output_tokens=9)
    first, second = written(workload, form=PromptForm.CHAT)
    assert first == [{"role": "user", "content": "What is 2?"}]
    assert second == [
        {"role": "user", "content": "What is 2?"},
        {"role": "assistant", "content": "reply 0"},
        {"role": "user", "content": "And 3?"},
    ]
    assert written(workload, form=PromptForm.TEXT)[1] == "What is 2?\n\nreply 0And 3?\n\n"
    assert [request.num_output_tokens for request in workload.requests] == [9, 9]
    assert {request.category for request in workload.requests} == {"math"}


@pytest.mark.parametrize(
    "name", ["mooncake_conversation", "agent_sessions", "tracelab_sessions", "azure_llm_2023_conv"]
)
@pytest.mark.parametrize("scale", [1, 20])
def test_reusable_tokens_are_those_of_a_cache_that_keeps_everything(name: str, scale: int) -> None:
    workload = read_sample(name, scale=scale).limited(max_requests=30)
    writer = PromptWriter(PromptForm.IDS, vocabulary=range(5000), num_blocks=workload.num_blocks, seed=0)
    replies: dict[int, ReplyContent] = {}
    seen: list[list[int]] = []
    found = 0
    for request in workload.requests:
        prompt = writer.write(request, replies)["prompt"]
        found += max((num_common(prompt, earlier) for earlier in seen), default=0)
        reply = tuple(range(9000, 9000 + request.num_output_tokens))
        replies[request.index] = ReplyContent(text="", token_ids=reply)
        seen.append([*prompt, *reply])
    expected = count_reusable_tokens(workload)
    assert expected <= found <= expected + 2 * len(seen)  # a token or two by chance
    assert (expected > 0) == (name != "azure_llm_2023_conv")


def test_a_block_that_was_cut_is_not_one_that_goes_on() -> None:
    def request(index: int, *pieces: Blocks) -> PlannedRequest:
        return PlannedRequest(index=index, prompt=pieces, num_output_tokens=1)

    def run(number: int, num_tokens: int) -> Blocks:
        return Blocks(block_numbers=(number,), block_tokens=8, num_tokens=num_tokens)

    requests = (
        request(0, run(0, 8), run(1, 8)),
        request(1, run(0, 5), run(1, 8)),  # 5 tokens of the first block, and then others than before
        request(2, run(0, 8), run(1, 3)),
        request(3, run(0, 8), run(1, 8)),
    )
    workload = Workload(kind="synthetic", sessions=(Session(name="", start_s=None, requests=requests),), num_blocks=2)
    assert count_reusable_tokens(workload) == 5 + 11 + 16
