import dataclasses
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from specdec.cli.engine_options import ENGINE_OPTIONS, engine_settings
from specdec.cli.option_table import OptionTable, TableOption, takes_options
from specdec.cli.sampling_options import SAMPLING_OPTIONS
from specdec.dcp.layout import KvFormat
from specdec.engine import DTYPES
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError, RequestError
from specdec.grammar.grammar import Grammar
from specdec.models.glm.mtp import MtpIndexSharing
from specdec.sampling.accept import AcceptanceRule
from specdec.sampling.sampling_params import SamplingParams

ENGINE_FLAGS = {option.name: option for table in ENGINE_OPTIONS for option in table.options}
SAMPLING_FLAGS = {option.name: option for option in SAMPLING_OPTIONS.options}


def given_by(*arguments: str) -> dict[str, Any]:
    """What a command receives of a table with one option of each kind."""
    table = OptionTable(
        "Kinds",
        (
            TableOption(name="top_k", type=int, help="A number."),
            TableOption(name="stop", type=list[str], help="Repeatable.", parse=tuple),
            TableOption(name="ignore_eos", type=bool, help="A switch."),
            TableOption(name="prefix_cache", type=bool, help="A switch that is on.", switches_off=True),
        ),
    )
    received: dict[str, Any] = {}

    @takes_options(sampling=(table,))
    def command(*, name: Annotated[str, typer.Option()] = "none", sampling: Mapping[str, Any]) -> None:
        received.update(sampling, name=name)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return received


def test_options_that_are_not_given_are_not_passed_on() -> None:
    assert given_by() == {"name": "none"}


def test_options_that_are_given_are_passed_on_whatever_their_value() -> None:
    assert given_by("--top-k", "0", "--stop", "", "--name", "x") == {"name": "x", "top_k": 0, "stop": ("",)}
    assert given_by("--stop", "a", "--stop", "b") == {"name": "none", "stop": ("a", "b")}


def test_switches_give_what_they_say() -> None:
    assert given_by("--ignore-eos", "--no-prefix-cache") == {
        "name": "none",
        "ignore_eos": True,
        "prefix_cache": False,
    }


def test_flags_that_set_the_same_exclude_each_other() -> None:
    table = OptionTable(
        "Forms",
        (
            TableOption(name="json_object", type=bool, help="One.", sets="grammar"),
            TableOption(name="regex", type=str, help="Another.", sets="grammar"),
        ),
    )
    received: dict[str, Any] = {}

    @takes_options(sampling=(table,))
    def command(*, sampling: Mapping[str, Any]) -> None:
        received.update(sampling)

    app = typer.Typer()
    app.command()(command)
    CliRunner().invoke(app, ["--regex", "a"], catch_exceptions=False)
    assert received == {"grammar": "a"}
    with pytest.raises(ConfigError, match="--json-object and --regex exclude each other"):
        CliRunner().invoke(app, ["--json-object", "--regex", "a"], catch_exceptions=False)


def test_grammars_are_read(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "integer"}')
    assert SAMPLING_FLAGS["json_schema"].read(str(path)) == Grammar.json_schema({"type": "integer"})
    assert SAMPLING_FLAGS["json_object"].read(True) == Grammar.json_object()
    assert SAMPLING_FLAGS["regex"].read("a|b") == Grammar.regex("a|b")
    path.write_text('{"type": "whole"}')
    with pytest.raises(
        RequestError, match=r"schema.json: grammar: json_schema cannot be followed: Invalid type: whole"
    ):
        SAMPLING_FLAGS["json_schema"].read(str(path))
    with pytest.raises(ConfigError, match=r"missing.json: cannot be read"):
        SAMPLING_FLAGS["json_schema"].read(str(tmp_path / "missing.json"))


def test_help_shows_brackets() -> None:
    table = OptionTable("Kinds", (TableOption(name="top_k", type=int, help="Most [red] likely [default: 7]."),))

    @takes_options(sampling=(table,))
    def command(*, sampling: Mapping[str, Any]) -> None: ...

    app = typer.Typer()
    app.command()(command)
    assert "Most [red] likely [default: 7]." in CliRunner().invoke(app, ["--help"]).output


def test_every_sampling_parameter_has_a_flag() -> None:
    assert {option.key for option in SAMPLING_OPTIONS.options} == {
        field.name for field in dataclasses.fields(SamplingParams)
    }


def test_every_engine_setting_has_a_flag() -> None:
    settings = {field.name for field in dataclasses.fields(EngineConfig)}
    assert settings - {"is_draft_length_auto"} <= set(ENGINE_FLAGS)  # which is part of --num-draft-tokens


def test_flags_are_named_after_what_they_set() -> None:
    assert SAMPLING_FLAGS["top_p"].flag == "--top-p"
    assert SAMPLING_FLAGS["skip_special_tokens"].flag == "--no-skip-special-tokens"
    assert ENGINE_FLAGS["prefix_cache"].flag == "--no-prefix-cache"


def test_help_names_the_defaults_that_hold() -> None:
    config = EngineConfig()
    named = {name: re.search(r"\[default: (\w+)\]", option.help) for name, option in ENGINE_FLAGS.items()}
    shown = {name: match[1] for name, match in named.items() if match and name != "dtype"}
    assert shown == {name: str(getattr(config, name)) for name in shown}
    assert {"num_draft_tokens", "page_size", "prefill_chunk_tokens"} <= set(shown)


@pytest.mark.parametrize(
    ("name", "members"),
    [("acceptance", AcceptanceRule), ("kv_format", KvFormat), ("mtp_index_sharing", MtpIndexSharing)],
)
def test_help_names_every_choice(name: str, members: type[StrEnum]) -> None:
    assert all(member in ENGINE_FLAGS[name].help for member in members)
    assert all(dtype in ENGINE_FLAGS["dtype"].help for dtype in DTYPES)


def test_aliases_become_one_setting() -> None:
    given = {"speculative_num_steps": 5, "speculative_eagle_topk": 1, "page_size": 16}
    assert engine_settings(given) == {"num_draft_tokens": 5, "page_size": 16}


@pytest.mark.parametrize(("text", "most"), [("auto", 5), ("auto:8", 8)])
def test_number_of_drafts_may_be_left_to_each_round(text: str, most: int) -> None:
    assert engine_settings({"num_draft_tokens": text}) == {"num_draft_tokens": most, "is_draft_length_auto": True}


def test_settings_leave_out_what_was_not_given() -> None:
    assert engine_settings({}) == {}


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("logit_bias", ["42:-1.5", " 7 : 2 "], {42: -1.5, 7: 2.0}),
        ("banned_token_ids", ["1,2", "3"], [1, 2, 3]),
        ("stop_token_ids", ["4 5"], [4, 5]),
        ("allowed_token_ids", [""], []),
    ],
)
def test_lists_are_read(name: str, values: list[str], expected: Any) -> None:
    assert SAMPLING_FLAGS[name].read(values) == expected
