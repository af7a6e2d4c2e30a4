import dataclasses
import json
import re

import pytest

from specdec.cli.plan import LAYOUT_OPTIONS, MEMORY_OPTIONS, REQUEST_OPTIONS
from specdec.memory.memory_plan import MemorySettings
from tests.specdec.cli.conftest import Run

TABLES = (MEMORY_OPTIONS, LAYOUT_OPTIONS, REQUEST_OPTIONS)

GLM_5_2 = ("plan", "glm-5.2-fp8", "--tp-size", 8, "--kv-format", "fp8_packed")


def test_the_plan_of_a_release_is_shown_without_any_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    outcome = run(*GLM_5_2, "--gpu-memory", "141GiB", "--dcp-size", 8)
    assert (outcome.exit_code, outcome.err) == (0, "")
    for component in ("embedding", "experts", "mtp", "target index keys", "draft latents", "scratch and zero pages"):
        assert component in outcome.out
    lines = {line.strip("│ \n").split("│")[0].strip(): line for line in outcome.out.splitlines()}
    assert lines["draft_pool_token_multiplier"].split()[-2] == "8"
    assert "96.33 GB" in lines["all weights"]
    assert "7,530.50" in lines["bytes of a rank per token"]
    assert "dcp_size 8 *" in lines
    assert "impossible" in lines["weight_format bfloat16"]
    assert "fp8 weights are a price" in outcome.out
    assert "\x1b" not in outcome.out  # colours are for terminals


def test_the_tables_fit_into_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tables = run(*GLM_5_2, "--gpu-memory", "999GiB", "--dcp-size", 8).out.split("note:")[0]
    assert "…" not in tables
    rows = [line for line in tables.splitlines() if line.startswith("│")]
    assert len(rows) > 30
    assert all(line.strip("│ ").split("│")[0].strip() for line in rows)  # no row goes on in a second line


def test_bars_are_as_long_as_what_they_show(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    outcome = run(*GLM_5_2, "--pool-bytes", "32.2GB", "--dcp-size", 8)
    tokens, bars = [], []
    for line in outcome.out.splitlines():
        if line.startswith("│ dcp_size"):
            _, _, _, num_tokens, _, bar, _ = line.split("│")
            tokens.append(int(num_tokens.replace(",", "")))
            bars.append(bar.count("█"))
    assert len(bars) == 4
    for num_tokens, bar in zip(tokens, bars, strict=True):
        assert abs(bar / bars[-1] - num_tokens / tokens[-1]) < 0.1
    assert tokens[0] < tokens[1] < tokens[2] < tokens[3]


def test_json_is_one_object_with_the_price_of_each_choice(run: Run) -> None:
    outcome = run(*GLM_5_2, "--pool-bytes", "32.2GB", "-dcp", 4, "--context", 100_000, "--json")
    values = json.loads(outcome.out)
    assert values["settings"]["dcp_size"] == values["draft_pool_token_multiplier"] == 4
    assert values["num_draft_pages"] == values["num_page_ids"] == 4 * values["num_target_pages"]
    assert values["num_tokens"] == 64 * values["num_page_ids"]
    assert values["largest_batch"] == values["num_page_ids"] // 1563
    assert sum(values["rank_bytes"]["weights"].values()) == values["weight_bytes"]
    assert sum(values["rank_bytes"]["pools"].values()) == values["pool_bytes"] <= 32_200_000_000
    tokens = {(c["setting"], c["value"]): c["capacity"]["num_tokens"] for c in values["choices"]}
    assert tokens["dcp_size", "4"] == values["num_tokens"] < tokens["dcp_size", "8"]
    assert tokens["index_keys", "replicated"] < values["num_tokens"] < tokens["draft", "off"]


def test_reserve_and_the_rest_of_the_device_are_part_of_the_memory(run: Run) -> None:
    outcome = run(*GLM_5_2, "--gpu-memory", "141GiB", "--reserve", "2GiB", "--static-fraction", 0.9, "--json")
    sections = json.loads(outcome.out)["rank_bytes"]
    assert sections["rest"]["reserve"] == 2 * 2**30
    assert sum(size for sizes in sections.values() for size in sizes.values()) == 141 * 2**30


def test_the_tiny_checkpoint_is_planned_without_a_draft(run: Run, model: str) -> None:
    outcome = run("plan", model, "--pool-bytes", "1MB", "--no-draft", "--page-size", 4, "--json")
    values = json.loads(outcome.out)
    assert values["settings"]["draft"] is False
    assert values["draft_pool_token_multiplier"] == values["num_draft_pages"] == 0
    assert "draft latents" not in values["rank_bytes"]["pools"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GLM_5_2,), "--gpu-memory 141GiB"),
        ((*GLM_5_2, "--gpu-memory", "much"), "a size is a number"),
        ((*GLM_5_2, "--gpu-memory", "80GB"), "the weights of a rank take 96.33 GB"),
        ((*GLM_5_2, "--gpu-memory", "141GiB", "--dcp-size", 3), "dcp_size must divide tp_size 8, got 3: take one of"),
        (("plan", "glm-5.2", "--pool-bytes", "1GB", "--tp-size", 3), "tp_size must divide num_attention_heads 64"),
        ((*GLM_5_2, "--pool-bytes", "30GB", "--reserve", "1GB"), "--reserve is a part of --gpu-memory"),
        ((*GLM_5_2, "--pool-bytes", "30GB", "--static-fraction", 0.9), "--static-fraction is a part of --gpu-memory"),
        (("plan", "glm-9", "--pool-bytes", "1GB"), "neither a directory"),
    ],
)
def test_what_cannot_be_planned_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    outcome = run(*arguments)
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_every_setting_has_a_flag_whose_help_names_its_default() -> None:
    options = {option.name: option for table in TABLES for option in table.options}
    defaults = {field.name: field.default for field in dataclasses.fields(MemorySettings)}
    assert options.keys() == defaults.keys()
    named = {name: re.search(r"\[default: ([\w.]+)\]", option.help) for name, option in options.items()}
    shown = {name: match[1] for name, match in named.items() if match and name != "context"}
    assert shown == {name: str(defaults[name]) for name in shown}
    assert len(shown) == 7
