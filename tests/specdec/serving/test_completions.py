"""`/v1/completions`, `/tokenize` and `/detokenize` over an engine that says what it is told to."""

from typing import Any

import pytest

from specdec.models.glm.released import locate_checkpoint
from specdec.sampling.sampling_params import SamplingParams
from specdec.text.tokenizer import Tokenizer
from tests.support.fake_engine import END, FakeEngine
from tests.support.running_server import RunningServer, events


def complete(server: RunningServer, **fields: Any) -> dict[str, Any]:
    with server.client() as client:
        response = client.post("/v1/completions", json={"max_tokens": 100, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: RunningServer, **fields: Any) -> list[Any]:
    with server.client() as client:
        response = client.post("/v1/completions", json={"max_tokens": 100, "stream": True, **fields})
    assert response.status_code == 200, response.text
    chunks = events(response)
    assert chunks[-1] == "[DONE]"
    return chunks[:-1]


def test_prompts_may_be_texts_ids_and_lists_of_both(engine: FakeEngine, server: RunningServer) -> None:
    assert engine.tokenizer is not None
    encode = engine.tokenizer.encode
    prompts: list[tuple[Any, list[list[int]]]] = [
        ("def f", [encode("def f")]),
        ([5, 6, 7], [[5, 6, 7]]),
        (["def f", "x"], [encode("def f"), encode("x")]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ]
    for prompt, token_ids in prompts:
        engine.prepared.clear()
        answer = complete(server, prompt=prompt, n=2)
        assert [prepared for prepared, _ in engine.prepared] == token_ids
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(token_ids)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, token_ids))
        assert answer["object"] == "text_completion"


def test_chunks_join_to_the_whole_answer(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = "你好 🙂 hello" + END
    for tokens_per_round in (1, 4, 100):
        engine.tokens_per_round = tokens_per_round
        fields: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "logprobs": 1, "stop": "llo"}
        whole = complete(server, **fields)
        chunks = stream(server, **fields, stream_options={"include_usage": True})
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        for choice in whole["choices"]:
            assert (choice["text"], choice["finish_reason"]) == ("你好 🙂 he", "stop")
            own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
            assert "".join(each["text"] for each in own) == choice["text"]
            assert own[-1]["finish_reason"] == "stop"
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [value for each in own for value in each["logprobs"][name]] == choice["logprobs"][name]


def test_at_most_16_tokens_are_made_where_no_number_is_given(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = "x " * 300
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "x"}).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_special_tokens_are_left_out_unless_asked_for(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = "a<|image|>b" + END
    assert complete(server, prompt="x")["choices"][0]["text"] == "ab"
    assert complete(server, prompt="x", skip_special_tokens=False)["choices"][0]["text"] == "a<|image|>b"
    kept = complete(server, prompt="x", skip_special_tokens=False, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == "a<|image|>b" + END


def test_fields_become_sampling_parameters(engine: FakeEngine, server: RunningServer) -> None:
    complete(
        server,
        prompt="x",
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 1.5},
        seed=-3,
        stop=["###", "~~~"],
        stop_token_ids=[7],
        min_tokens=1,
        max_tokens=9,
        ignore_eos=True,
        include_stop_str_in_output=True,
        allowed_token_ids=[5, 6, 8, 9],
        banned_token_ids=[8],
        logprobs=2,
        skip_special_tokens=False,
        best_of=2,
        echo=False,
    )
    assert engine.prepared[-1][1] == SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={5: -100.0, 6: 1.5},
        seed=-3,
        stop=("###", "~~~"),
        stop_token_ids=(7,),
        min_tokens=1,
        max_tokens=9,
        ignore_eos=True,
        include_stop_in_output=True,
        allowed_token_ids=(5, 6, 8, 9),
        banned_token_ids=(8,),
        logprobs=2,
        skip_special_tokens=False,
    )


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"temperature": 0.25}, {"temperature": 0.25}),
        ({"top_k": 3}, {"top_k": 3}),
        ({"min_p": 0.5}, {"min_p": 0.5}),
        ({"presence_penalty": -1}, {"presence_penalty": -1.0}),
        ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"logit_bias": {"7": 100}}, {"logit_bias": {7: 100.0}}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"seed": 0}, {"seed": 0}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"max_tokens": 1}, {"max_tokens": 1}),
    ],
)
def test_field_alone_changes_its_parameter_alone(
    engine: FakeEngine, server: RunningServer, given: dict[str, Any], parameter: dict[str, Any]
) -> None:
    complete(server, prompt="x", **given)
    assert engine.prepared[-1][1] == SamplingParams(**{"max_tokens": 100, **parameter})


def test_text_becomes_tokens_and_tokens_become_text(server: RunningServer) -> None:
    tokenizer = Tokenizer(locate_checkpoint("glm-tiny") / "tokenizer.json")
    text = "def f(): 你好 <think>"
    with server.client() as client:
        answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert answer["tokens"] == tokenizer.encode(text)
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 2048)
        assert len(answer["token_strs"]) == answer["count"]
        assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
        messages = [{"role": "user", "content": "Hello"}]
        answer = client.post(
            "/tokenize", json={"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
        ).json()
        rendered = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
        assert rendered == "[gMASK]<sop><|user|>Hello<|assistant|><think></think>"
        for body in ({}, {"prompt": "x", "messages": messages}, {"messages": []}):
            assert client.post("/tokenize", json=body).status_code == 400
        for tokens in ([-1], [10**6], ["x"], 7):
            assert client.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_models_are_listed_by_every_name(server: RunningServer) -> None:
    with server.client() as client:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["tiny"]
        assert client.get("/v1/models/tiny").json() == listed["data"][0]
        assert listed["data"][0]["max_model_len"] == 2048
        assert "version" in client.get("/version").json()
