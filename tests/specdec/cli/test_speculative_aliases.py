from typing import Any

import pytest

from specdec.cli.speculative_aliases import resolve_num_draft_tokens
from specdec.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "num_draft_tokens"),
    [
        ({}, None),
        ({"num_draft_tokens": "0"}, 0),
        ({"num_draft_tokens": "auto"}, 5),
        ({"num_draft_tokens": "auto:2", "num_speculative_tokens": 2}, 2),
        ({"num_speculative_tokens": 2}, 2),
        ({"speculative_num_steps": 3}, 3),
        ({"speculative_num_draft_tokens": 4}, 3),
        ({"speculative_num_draft_tokens": 1}, 0),
        ({"speculative_algorithm": "EAGLE"}, None),
        ({"speculative_algorithm": "nextn", "num_draft_tokens": "1"}, 1),
        ({"speculative_config": '{"method": "mtp", "num_speculative_tokens": 3}'}, 3),
        ({"speculative_config": '{"method": "deepseek_mtp"}'}, None),
        (
            {
                "speculative_algorithm": "EAGLE",
                "speculative_num_steps": 3,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": 4,
            },
            3,
        ),
        ({"num_draft_tokens": "3", "speculative_config": '{"method": "mtp", "num_speculative_tokens": 3}'}, 3),
    ],
)
def test_flags_of_other_engines_mean_the_same(given: dict[str, Any], num_draft_tokens: int | None) -> None:
    assert resolve_num_draft_tokens(given) == num_draft_tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"speculative_num_steps": 3, "speculative_num_draft_tokens": 3},
            "--speculative-num-steps 3 means 3 draft tokens and --speculative-num-draft-tokens 3 means 2",
        ),
        ({"num_draft_tokens": "2", "num_speculative_tokens": 3}, "means 2 draft tokens and .* means 3"),
        ({"num_draft_tokens": "2", "speculative_config": '{"method": "mtp", "num_speculative_tokens": 1}'}, "means 1"),
        ({"speculative_algorithm": "EAGLE", "num_draft_tokens": "0"}, "EAGLE switches speculation on"),
        ({"speculative_algorithm": "EAGLE3"}, "must be one of EAGLE, NEXTN.*got 'EAGLE3'"),
        ({"speculative_eagle_topk": 4}, "must be 1.*no draft trees; got 4"),
        ({"speculative_eagle_topk": 0}, "must be 1"),
        ({"speculative_num_draft_tokens": 0}, "must be >= 1, got 0"),
        ({"num_draft_tokens": "auto", "num_speculative_tokens": 3}, "--num-draft-tokens auto means 5 draft tokens"),
        ({"num_draft_tokens": "-1"}, "--num-draft-tokens must be an integer >= 0, auto or auto:K, got '-1'"),
        ({"num_draft_tokens": "auto:"}, "got 'auto:'"),
        ({"num_draft_tokens": "automatic"}, "got 'automatic'"),
        ({"num_speculative_tokens": -1}, "--num-speculative-tokens must be >= 0, got -1"),
    ],
)
def test_what_contradicts_or_does_not_exist_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_num_draft_tokens(given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mtp", "must be a JSON object, got 'mtp'"),
        ("[1]", "must be a JSON object"),
        ('{"num_speculative_tokens": 3}', "got None"),
        ('{"method": "ngram", "num_speculative_tokens": 3}', "got 'ngram'"),
        ('{"method": "mtp", "prompt_lookup_max": 4}', "'prompt_lookup_max' is not implemented"),
        ('{"method": "mtp", "num_speculative_tokens": "3"}', "must be an integer >= 0, got '3'"),
        ('{"method": "mtp", "num_speculative_tokens": true}', "got True"),
    ],
)
def test_a_speculative_config_is_refused_by_the_part_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_num_draft_tokens({"speculative_config": text})
