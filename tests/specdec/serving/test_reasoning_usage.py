"""O12: the usage of a reply that ends while it thinks, inside of an accepted run.

The end is forced: it is banned by `min_tokens` up to a place, and by its bias it is what comes there. The drafts are
the reply itself, so that the run goes on to the end and, without it, would go on behind it.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from specdec.drafting.scripted_draft import ScriptedDraft
from specdec.engine import Engine
from specdec.request import Request
from specdec.serving.engine_gauges import read_gauges
from tests.support.running_server import RunningServer, events, running_server

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
VOCAB_SIZE = 3072
NUM_DRAFTS = 5
# The first token comes of the prompt; then a run of drafts has a place for the end in front of, among and behind them.
PLACES = range(NUM_DRAFTS + 3)
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


class Oracle:
    """Knows the replies without drafts, and goes on behind their end as if there were none."""

    def __init__(self) -> None:
        self.token_ids_by_place: dict[int, Sequence[int]] = {}

    def continuation(self, request: Request) -> Sequence[int]:
        return [*self.token_ids_by_place[request.params.min_tokens], 5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningServer]:
    with Engine.from_pretrained("glm-tiny", num_draft_tokens=0) as engine, serving(engine) as server:
        yield server


@pytest.fixture(scope="module", params=[None, 3], ids=["right", "fourth wrong"])
def drafting(request: Any, oracle: Oracle) -> Iterator[RunningServer]:
    source = ScriptedDraft(oracle.continuation, vocab_size=VOCAB_SIZE, wrong_at=request.param)
    with (
        Engine.from_pretrained("glm-tiny", num_draft_tokens=NUM_DRAFTS, draft_source=source) as engine,
        serving(engine) as server,
    ):
        yield server


def serving(engine: Engine) -> Any:
    return running_server(engine, read_gauges=partial(read_gauges, engine))


def reply_of(server: RunningServer, place: int, *, is_streamed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A reply whose token at `place` is the end, and its usage."""
    end_id = server.service.engine.eos_ids[0]
    body = {
        "messages": QUESTION,
        "temperature": 0,
        "min_tokens": place,
        "max_tokens": 40,
        "logit_bias": {str(end_id): 100},
        "return_token_ids": True,
    }
    with server.client() as client:
        if not is_streamed:
            answer = client.post("/v1/chat/completions", json=body).json()
            (choice,) = answer["choices"]
            reasoning = choice["message"].get("reasoning_content", "")
            assert not choice["message"]["content"]
            return {
                "reasoning": reasoning,
                "token_ids": choice["token_ids"],
                "finish_reason": choice["finish_reason"],
            }, answer["usage"]
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, done = events(client.post("/v1/chat/completions", json=streamed))
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert not any(choice["delta"].get("content") for choice in choices)
    return {
        "reasoning": "".join(choice["delta"].get("reasoning_content", "") for choice in choices),
        "token_ids": [token_id for choice in choices for token_id in choice.get("token_ids", ())],
        "finish_reason": choices[-1]["finish_reason"],
    }, last["usage"]


def test_o12_reply_that_ends_while_it_thinks_has_the_same_usage_with_drafts(
    plain: RunningServer, drafting: RunningServer, oracle: Oracle
) -> None:
    num_accepted = 0
    for place in PLACES:
        right, usage = reply_of(plain, place, is_streamed=False)
        num_tokens = len(right["token_ids"])
        end_id = plain.service.engine.eos_ids[0]
        assert (num_tokens, right["token_ids"][-1], right["finish_reason"]) == (place + 1, end_id, "stop")
        assert bool(right["reasoning"]) == (place > 0)
        assert usage["completion_tokens"] == num_tokens
        assert usage["completion_tokens_details"]["reasoning_tokens"] == place
        assert usage["total_tokens"] == usage["prompt_tokens"] + num_tokens
        oracle.token_ids_by_place[place] = right["token_ids"]
        for server, is_streamed in ((plain, True), (drafting, False), (drafting, True)):
            reply, own = reply_of(server, place, is_streamed=is_streamed)
            assert reply == right
            assert [own[name] for name in COUNTS] == [usage[name] for name in COUNTS]
            details = own["completion_tokens_details"]
            assert details["reasoning_tokens"] == place
            assert details["accepted_prediction_tokens"] <= num_tokens
            if server is plain:
                assert details["accepted_prediction_tokens"] == 0
            num_accepted += details["accepted_prediction_tokens"]
    assert num_accepted > 2 * len(PLACES)
