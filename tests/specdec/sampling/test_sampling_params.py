"""What a request may ask, and how a refusal reads."""

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.errors import CheckpointError, RequestError
from specdec.sampling.sampling_params import SamplingParams, generation_defaults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-7),
        ("temperature", "1"),
        ("temperature", 10**400),
        ("temperature", np.float32("nan")),
        ("temperature", None),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("top_k", -2),
        ("top_k", 3.0),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: float("-inf")}),
        ("banned_token_ids", 3),
        ("banned_token_ids", [-3]),
        ("banned_token_ids", "12"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.0]),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("seed", np.float64(1.0)),
        ("top_k", np.int64(-2)),
        ("stop", [""]),
        ("stop", ["a\udcff"]),
        ("stop", ""),
        ("stop", [3]),
        ("stop", ["x"] * 65),
        ("stop", 3),
        ("stop_token_ids", ["a"]),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 10.0),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("logprobs", 129),
        ("logprobs", True),
        ("prompt_logprobs", "2"),
        ("include_stop_in_output", "yes"),
        ("skip_special_tokens", None),
    ],
)
def test_an_impossible_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_a_refusal_names_the_value_and_the_rule() -> None:
    with pytest.raises(RequestError, match=r"top_p must be in 0\.\.1, got 1\.5"):
        SamplingParams(top_p=1.5)


def test_a_refused_key_of_the_bias_is_not_taken_for_its_value() -> None:
    with pytest.raises(RequestError, match=r"^a key of logit_bias must be an integer, got '5'$"):
        SamplingParams(logit_bias={"5": 1.0})  # type: ignore[dict-item]


def test_more_tokens_cannot_be_required_than_allowed() -> None:
    with pytest.raises(RequestError, match="min_tokens must not exceed max_tokens 3, got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3


def test_the_borders_of_every_range_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=0, top_k=-1, min_p=1.0, seed=-(2**63))
    SamplingParams(temperature=1e-5, top_p=1, top_k=0, min_p=0, seed=2**64 - 1, logprobs=0)


def test_lists_become_ordered_tuples_without_repetition() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 1, 3], banned_token_ids={2}, allowed_token_ids=[5, 4])  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert (params.stop_token_ids, params.banned_token_ids, params.allowed_token_ids) == ((1, 3), (2,), (4, 5))
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")  # type: ignore[arg-type]


def test_later_changes_of_the_given_bias_do_not_enter() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}


def test_numbers_of_numpy_become_plain_ones() -> None:
    """So that what is made of them, JSON above all, never sees another type."""
    params = SamplingParams(
        n=np.int32(2),  # type: ignore[arg-type]
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
        top_k=np.int64(4),  # type: ignore[arg-type]
        max_tokens=np.int16(7),  # type: ignore[arg-type]
        logprobs=np.int8(1),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        logit_bias={np.int64(3): np.float32(1.5)},  # type: ignore[dict-item]
        stop_token_ids=list(np.array([9, 8])),  # type: ignore[arg-type]
    )
    expected = SamplingParams(
        n=2,
        seed=2**64 - 1,
        top_k=4,
        max_tokens=7,
        logprobs=1,
        temperature=0.5,
        logit_bias={3: 1.5},
        stop_token_ids=(8, 9),
    )
    assert params == expected
    json.dumps(dataclasses.asdict(params))


def test_equal_parameters_are_one_key_of_a_dictionary() -> None:
    seen = {SamplingParams(seed=5, logit_bias={3: 1.0}): "first", SamplingParams(seed=5): "second"}
    assert seen[SamplingParams(seed=5, logit_bias={3: 1.0})] == "first"
    assert seen[SamplingParams(seed=5)] == "second"


def test_parameters_survive_pickling() -> None:
    params = SamplingParams(seed=5, logit_bias={3: 1.0}, stop=("x",))
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": {10: 1.0}},
        {"banned_token_ids": (10,)},
        {"allowed_token_ids": (3, 10)},
        {"stop_token_ids": (11,)},
        {"logprobs": 11},
    ],
)
def test_ids_and_counts_beyond_the_vocabulary_are_refused(asked: dict[str, Any]) -> None:
    params = SamplingParams(**asked)
    with pytest.raises(RequestError, match="vocabulary size 10"):
        params.check(vocab_size=10)
    params.check(vocab_size=12)


@pytest.mark.parametrize(
    "asked",
    [{"banned_token_ids": tuple(range(6))}, {"allowed_token_ids": (2, 3), "banned_token_ids": (1, 2, 3)}],
)
def test_bans_must_leave_a_token(asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="banned_token_ids"):
        SamplingParams(**asked).check(vocab_size=6)


def test_given_values_win_over_defaults_even_when_they_are_the_usual_ones() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95}
    params = SamplingParams.with_defaults({"temperature": 1.0, "seed": 3}, defaults)
    assert (params.temperature, params.top_p, params.seed) == (1.0, 0.95, 3)
    assert SamplingParams.with_defaults({}, {}) == SamplingParams()


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="top_q is not a sampling parameter"):
        SamplingParams.with_defaults({"top_q": 1}, {})


def test_a_missing_seed_is_drawn_once_and_a_given_one_stays() -> None:
    assert SamplingParams(seed=0).with_fresh_seed().seed == 0
    fresh = SamplingParams().with_fresh_seed()
    assert fresh.seed is not None
    assert fresh.with_fresh_seed() == fresh
    assert SamplingParams().with_fresh_seed() != fresh


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert generation_defaults(path) == {}
    path.write_text(json.dumps({"temperature": 1.0, "top_p": 0.95, "top_k": None, "eos_token_id": [1], "_from": "x"}))
    assert generation_defaults(path) == {"temperature": 1.0, "top_p": 0.95}
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.7}))
    assert generation_defaults(path) == {"temperature": 0.0}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"top_p": 2}', '{"temperature": "warm"}'])
def test_a_corrupt_generation_config_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        generation_defaults(path)
