import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine, Grammar, SamplingParams
from specdec.models.glm.target import GlmTarget
from tests.specdec.cli.conftest import Run

GREEDY = ("--temperature", 0, "--max-tokens", 12, "--ignore-eos")


@pytest.fixture(scope="module")
def engine(model: str) -> Engine:
    return Engine.from_pretrained(model)


def records(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def greedy_ids(engine: Engine, prompt: str | list[int]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return list(engine.generate(prompt, params)[0].token_ids)


def test_json_is_one_object_a_request(run: Run, model: str, engine: Engine) -> None:
    outcome = run("generate", "--model", model, "--prompt-ids", "5,6,7,8", *GREEDY, "--json")
    assert outcome.exit_code == 0
    assert outcome.err == ""
    (record,) = records(outcome.out)
    token_ids = greedy_ids(engine, [5, 6, 7, 8])
    speculation = record.pop("speculation")
    assert isinstance(record.pop("seed"), int)
    assert record == {
        "request_index": 0,
        "index": 0,
        "token_ids": token_ids,
        "text": engine.tokenizer.decode(token_ids, skip_special_tokens=True) if engine.tokenizer else "",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16, "cached_tokens": 0},
    }
    assert set(speculation) == {
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "accepted_per_position",
        "acceptance_length",
    }
    assert speculation["num_accepted_tokens"] == sum(speculation["accepted_per_position"])
    assert speculation["acceptance_length"] == 1 + speculation["num_accepted_tokens"] / speculation["num_drafts"]


def test_the_text_goes_to_standard_output_and_the_rest_to_standard_error(run: Run, model: str, engine: Engine) -> None:
    outcome = run("generate", "--model", model, "--prompt", "hello", *GREEDY)
    assert engine.tokenizer is not None
    assert outcome.out == engine.tokenizer.decode(greedy_ids(engine, "hello"), skip_special_tokens=True) + "\n"
    assert "loaded" in outcome.err
    assert "5 prompt + 12 new tokens" in outcome.err


def test_output_is_the_same_without_speculation(run: Run, model: str) -> None:
    arguments = ("generate", "--model", model, "--prompt", "hello", "--max-tokens", 12, "--seed", 3, "--json")
    plain, speculative = (records(run(*arguments, "--num-draft-tokens", k).out)[0] for k in (0, 4))
    assert plain["token_ids"] == speculative["token_ids"]
    assert plain["speculation"]["num_drafts"] == 0
    assert plain["speculation"]["acceptance_length"] is None
    assert len(speculative["speculation"]["accepted_per_position"]) == 4


def sampling_of(monkeypatch: pytest.MonkeyPatch, run: Run, *arguments: Any) -> SamplingParams:
    """The sampling parameters that reach the engine."""
    reached: list[SamplingParams] = []
    stream = Engine.stream

    def spy(self: Engine, prompt: list[int], params: SamplingParams) -> Any:
        reached.append(params)
        return stream(self, prompt, params)

    monkeypatch.setattr(Engine, "stream", spy)
    assert run("generate", *arguments).exit_code == 0
    return reached[0]


def test_flags_not_given_leave_the_checkpoints_defaults(monkeypatch: pytest.MonkeyPatch, run: Run, model: str) -> None:
    params = sampling_of(monkeypatch, run, "--model", model, "--prompt", "a", "--max-tokens", 1, "--temperature", 0.5)
    assert params == SamplingParams(temperature=0.5, top_p=0.95, max_tokens=1, seed=params.seed)


def test_every_sampling_flag_reaches_the_engine(monkeypatch: pytest.MonkeyPatch, run: Run, model: str) -> None:
    expected = SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={42: -1.5, 7: 2.0},
        banned_token_ids=(3, 4),
        allowed_token_ids=(3, 42, 7, 8, 9),
        seed=2**63,
        grammar=Grammar.regex("[!-~]*"),
        stop=("END", "\n\n"),
        stop_token_ids=(9,),
        min_tokens=1,
        max_tokens=2,
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=0,
        include_stop_in_output=True,
        skip_special_tokens=False,
    )
    assert all(getattr(expected, name) != getattr(SamplingParams(), name) for name in SamplingParams.__slots__)
    flags = (
        "--n 2 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.01 --repetition-penalty 1.1 --presence-penalty 0.2 "
        "--frequency-penalty -0.3 --logit-bias 42:-1.5 --logit-bias 7:2 --banned-token-ids 4,3 "
        "--allowed-token-ids 3,42,7,8,9 --seed 9223372036854775808 --stop END --stop-token-ids 9 --min-tokens 1 "
        "--max-tokens 2 --ignore-eos --logprobs 1 --prompt-logprobs 0 --include-stop-in-output --no-skip-special-tokens"
    )
    given = (*flags.split(), "--regex", "[!-~]*", "--stop", "\n\n", "--json")
    assert sampling_of(monkeypatch, run, "--model", model, "--prompt", "a", *given) == expected


def test_every_engine_flag_reaches_the_engine(monkeypatch: pytest.MonkeyPatch, run: Run, model: str) -> None:
    reached: dict[str, Any] = {}
    load = Engine.from_pretrained.__func__  # type: ignore[attr-defined]

    def spy(cls: type[Engine], /, path: str, **settings: Any) -> Engine:
        reached.update(settings)
        return load(cls, path, **settings)  # type: ignore[no-any-return]

    monkeypatch.setattr(Engine, "from_pretrained", classmethod(spy))
    flags = (
        "--dtype bfloat16 --device cpu --latent-norm-eps 1e-6 --kv-format fp8 --kv-scale 2 --page-size 4 "
        "--num-pages 60 --max-model-len 200 --prefill-chunk-tokens 7 --max-num-requests 3 --no-prefix-cache "
        "--acceptance rejection --mtp-index-sharing anchor-and-drafts --speculative-num-steps 2"
    )
    assert run("generate", "--model", model, "--prompt", "a", "--max-tokens", 1, *flags.split()).exit_code == 0
    del reached["on_progress"]
    assert reached == {
        "dtype": "bfloat16",
        "device": "cpu",
        "latent_norm_eps": 1e-6,
        "kv_format": "fp8",
        "kv_scale": 2.0,
        "page_size": 4,
        "num_pages": 60,
        "max_model_len": 200,
        "prefill_chunk_tokens": 7,
        "max_num_requests": 3,
        "prefix_cache": False,
        "acceptance": "rejection",
        "mtp_index_sharing": "anchor-and-drafts",
        "num_draft_tokens": 2,
    }


def test_a_seed_that_was_drawn_gives_the_text_again(run: Run, model: str) -> None:
    arguments = ("generate", "--model", model, "--prompt", "hello", "--max-tokens", 8, "--json")
    first = records(run(*arguments).out)[0]
    assert records(run(*arguments, "--seed", first["seed"]).out)[0]["token_ids"] == first["token_ids"]


def test_choices_have_an_object_each(run: Run, model: str) -> None:
    outcome = run("generate", "--model", model, "--prompt", "hi", "--n", 3, "--max-tokens", 6, "--ignore-eos", "--json")
    choices = records(outcome.out)
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 1
    assert [choice["usage"]["completion_tokens"] for choice in choices] == [6, 6, 6]


def test_a_batch_gives_what_each_prompt_gives_alone(
    run: Run, model: str, engine: Engine, lines_file: Callable[..., Path]
) -> None:
    batch = lines_file(
        '{"prompt": "hello"}',
        '{"prompt_ids": [5, 6, 7, 8], "max_tokens": 3}',
        '{"messages": [{"role": "user", "content": "hello"}], "logit_bias": {"65": 100}, "max_tokens": 2}',
    )
    outcome = run("generate", "--model", model, "--batch", batch, *GREEDY, "--json")
    first, second, third = records(outcome.out)
    assert first["token_ids"] == greedy_ids(engine, "hello")
    assert second["token_ids"] == greedy_ids(engine, [5, 6, 7, 8])[:3]
    assert third["token_ids"] == [65, 65]
    assert [record["request_index"] for record in (first, second, third)] == [0, 1, 2]
    assert third["usage"]["prompt_tokens"] == len(engine.encode([{"role": "user", "content": "hello"}]))


def test_texts_of_several_prompts_are_told_apart(run: Run, model: str, lines_file: Callable[..., Path]) -> None:
    batch = lines_file('{"prompt": "hello"}', '{"prompt": "world", "n": 2}')
    lines = run("generate", "--model", model, "--batch", batch, "--max-tokens", 2).out.splitlines()
    marks = [line for line in lines if line.startswith("--- ")]
    assert marks == ["--- prompt 0, choice 0", "--- prompt 1, choice 0", "--- prompt 1, choice 1"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "b", "temprature": 1}', "line 2: temprature is not a sampling parameter"),
        ('{"prompt": "b", "top_p": 2}', "line 2: top_p must be in 0..1, got 2"),
        ('{"prompt_ids": [1, 2.0]}', "line 2: prompt_ids[1] must be a token id, got 2.0"),
        ('{"prompt_ids": [512]}', "line 2: prompt token 0 must be an id in 0..511, got 512"),
        ('{"messages": [{"content": "b"}]}', "line 2: messages[0] must be an object with a role"),
    ],
)
def test_a_line_that_cannot_be_served_is_named_and_nothing_runs(
    run: Run, model: str, lines_file: Callable[..., Path], line: str, message: str
) -> None:
    outcome = run("generate", "--model", model, "--batch", lines_file('{"prompt": "a"}', line), "--json")
    assert outcome.exit_code == 2
    assert outcome.out == ""
    assert message in outcome.err


def test_a_line_that_fails_while_it_runs_leaves_the_others(
    run: Run, model: str, engine: Engine, lines_file: Callable[..., Path]
) -> None:
    nothing_left = '"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1'
    batch = lines_file('{"prompt": "a"}', f'{{"prompt": "b", {nothing_left}}}', '{"prompt": "hello"}')
    outcome = run("generate", "--model", model, "--batch", batch, *GREEDY, "--json")
    first, second, third = records(outcome.out)
    assert first["token_ids"] == greedy_ids(engine, "a")
    assert set(second) == {"request_index", "error"}
    assert third["token_ids"] == greedy_ids(engine, "hello")
    assert outcome.exit_code == 2
    assert "line 2: " in outcome.err
    assert "1 of 3 prompts failed" in outcome.err


def test_a_stream_that_fails_ends_with_a_record_of_why(run: Run, model: str) -> None:
    nothing_left = ("--allowed-token-ids", 5, "--stop-token-ids", 5, "--min-tokens", 1)
    outcome = run("generate", "--model", model, "--prompt", "b", *GREEDY, *nothing_left, "--stream", "--json")
    assert outcome.exit_code == 2
    *_, last = records(outcome.out)
    assert set(last) == {"request_index", "error"}
    assert last["error"] in outcome.err


def test_null_in_a_line_is_what_is_left_out(run: Run, model: str, lines_file: Callable[..., Path]) -> None:
    batch = lines_file('{"prompt": "a", "seed": null, "max_tokens": null, "top_p": null}', '{"prompt": "a", "seed": 3}')
    outcome = run("generate", "--model", model, "--batch", batch, "--max-tokens", 4, "--seed", 3, "--json")
    first, second = records(outcome.out)
    assert outcome.exit_code == 0
    assert first["seed"] == 3
    assert first["token_ids"] == second["token_ids"]
    (drawn,) = records(
        run(
            "generate",
            "--model",
            model,
            "--batch",
            lines_file('{"prompt": "a", "seed": null, "max_tokens": 2}'),
            "--json",
        ).out
    )
    assert isinstance(drawn["seed"], int)


def test_the_prompt_may_come_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, run: Run, model: str, engine: Engine
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    outcome = run("generate", "--model", model, "-", *GREEDY, "--json")
    assert records(outcome.out)[0]["token_ids"] == greedy_ids(engine, "hello\n")


def test_a_conversation_goes_through_the_chat_template(run: Run, model: str, engine: Engine, tmp_path: Path) -> None:
    chat: Mapping[str, Any] = {
        "messages": [{"role": "user", "content": "weather?"}],
        "tools": [{"type": "function", "function": {"name": "forecast"}}],
    }
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(chat))
    outcome = run("generate", "--model", model, "--messages", path, *GREEDY, "--json")
    prompt_ids = engine.apply_chat_template(chat["messages"], tools=chat["tools"])
    assert records(outcome.out)[0]["usage"]["prompt_tokens"] == len(prompt_ids)
    assert records(outcome.out)[0]["token_ids"] == greedy_ids(engine, prompt_ids)


def test_a_streamed_text_is_the_whole_text(run: Run, model: str) -> None:
    arguments = ("generate", "--model", model, "--prompt", "hello", *GREEDY)
    assert run(*arguments, "--stream").out == run(*arguments).out


def test_streamed_pieces_make_up_the_record_behind_them(run: Run, model: str) -> None:
    arguments = ("generate", "--model", model, "--prompt", "hello", *GREEDY, "--n", 2, "--logprobs", 1, "--json")
    *pieces, first, second = records(run(*arguments, "--stream").out)
    for record in (first, second):
        own = [piece for piece in pieces if piece["index"] == record["index"]]
        assert "".join(piece["delta"]["text"] for piece in own) == record["text"]
        for key in ("token_ids", "logprobs"):
            assert [value for piece in own for value in piece["delta"][key]] == record[key]
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["length"]


def test_logprobs_that_nobody_would_see_are_refused(run: Run, model: str, lines_file: Callable[..., Path]) -> None:
    for name in ("--logprobs", "--prompt-logprobs"):
        outcome = run("generate", "--model", model, "--prompt", "a", name, 1)
        assert (outcome.exit_code, outcome.out) == (2, "")
        assert f"{name} is printed with --json only" in outcome.err
    outcome = run("generate", "--model", model, "--batch", lines_file('{"prompt": "a", "logprobs": 1}'))
    assert outcome.exit_code == 2
    assert "line 1: logprobs is printed with --json only" in outcome.err


def test_a_failed_round_is_not_blamed_on_the_request(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any, **_settings: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(GlmTarget, "forward", fail)
    outcome = run("generate", "--model", model, "--prompt", "a", *GREEDY)
    assert outcome.exit_code == 1
    assert outcome.err.splitlines()[-1] == "specdec: request 0 failed in a round: RuntimeError: device lost"


def test_a_batch_cannot_be_streamed(run: Run, model: str, lines_file: Callable[..., Path]) -> None:
    batch = lines_file('{"prompt": "a"}', '{"prompt": "b"}')
    outcome = run("generate", "--model", model, "--batch", batch, "--stream")
    assert outcome.exit_code == 2
    assert "--stream prints one prompt at a time" in outcome.err


def test_logprobs_are_reported_for_output_and_prompt(run: Run, model: str) -> None:
    arguments = (
        "--max-tokens",
        2,
        "--temperature",
        0,
        "--logprobs",
        2,
        "--prompt-logprobs",
        1,
        "--banned-token-ids",
        9,
    )
    outcome = run("generate", "--model", model, "--prompt-ids", "5,6,7", *arguments, "--json")
    (record,) = records(outcome.out)
    assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
    assert [entry["token_id"] for entry in record["prompt_logprobs"]] == [6, 7]
    for entry in record["logprobs"]:
        assert entry["top"][0] == {"token_id": entry["token_id"], "logprob": entry["logprob"]}
        assert len(entry["top"]) == len(entry["raw_top"]) == 2
        assert entry["raw_logprob"] < entry["logprob"] < 0
