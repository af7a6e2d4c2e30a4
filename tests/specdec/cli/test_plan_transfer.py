"""The published arithmetic of resharding GLM-5.2 from layer-split prefill to DCP decode, from the command line."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.specdec.cli.conftest import Run

GLM_5_2 = ("plan-transfer", "glm-5.2-fp8", "--kv-format", "fp8", "--source", "cp:8", "--tokens", 32768)


def planned(run: Run, *options: Any) -> dict[str, Any]:
    outcome = run(*GLM_5_2, *options, "--json")
    assert (outcome.exit_code, outcome.err) == (0, "")
    values: dict[str, Any] = json.loads(outcome.out)
    values["kinds"] = {entry["kind"]: entry for entry in values["entries"]}
    return values


def test_eight_layer_split_ranks_to_four_decode_ranks(run: Run) -> None:
    values = planned(run, "--tp-size", 4, "--dcp-size", 4)
    assert values["source_layers"] == [10, 10, 10, 10, 10, 10, 9, 9]
    latents = values["kinds"]["target.latent"]
    assert latents["num_paths"] == 32
    assert latents["destination_rank_bytes"] == [368_050_176] * 4
    assert latents["total_bytes"] == 78 * 576 * 32768 == 1_472_200_704
    assert latents["share_of_everything_everywhere"] == 0.25
    assert [path["layers"] for path in latents["paths"][::4]] == values["source_layers"]
    assert {path["descriptors"] for path in latents["paths"]} == {
        128
    }  # one for each page of a rank, not for each layer


def test_two_decode_groups_receive_twice_as_much_over_twice_the_paths(run: Run) -> None:
    latents = planned(run, "--tp-size", 8, "--dcp-size", 4)["kinds"]["target.latent"]
    assert latents["num_paths"] == 64
    assert latents["destination_rank_bytes"] == [368_050_176] * 8
    assert latents["total_bytes"] == 2_944_401_408
    assert latents["share_of_everything_everywhere"] == 0.25


def test_index_keys_draft_and_hidden_state_go_beside_the_latents(run: Run) -> None:
    values = planned(run, "--tp-size", 4, "--dcp-size", 4)
    assert values["kinds"]["target.index_keys"]["total_bytes"] == 21 * 132 * 32768
    assert values["kinds"]["target.index_keys"]["share_of_everything_everywhere"] == 0.25
    for kind, token_bytes in (("draft.latent", 576), ("draft.index_keys", 132)):
        draft = values["kinds"][kind]
        assert draft["destination_rank_bytes"] == [token_bytes * 32767] * 4  # decode writes the row of the last token
        assert draft["source_rank_bytes"] == [0] * 7 + [4 * token_bytes * 32767]
    assert values["hidden_state_bytes"] == 4 * 6144


def test_a_layer_major_pool_takes_a_descriptor_for_each_layer_of_each_page(run: Run) -> None:
    latents = planned(run, "--tp-size", 4, "--dcp-size", 4, "--layout", "layer-major")["kinds"]["target.latent"]
    assert [path["descriptors"] for path in latents["paths"][::4]] == [1280] * 6 + [1152] * 2
    assert latents["total_bytes"] == 1_472_200_704


def test_a_prefix_that_decode_has_is_not_sent(run: Run) -> None:
    values = planned(run, "--tp-size", 4, "--dcp-size", 4, "--prefix", 32768 - 256)
    assert values["kinds"]["target.latent"]["total_bytes"] == 78 * 576 * 256
    assert values["kinds"]["draft.latent"]["destination_rank_bytes"] == [576 * 255] * 4


@pytest.mark.parametrize("source", ["tp:4", "dcp:2"])
def test_every_source_sends_each_cell_once(run: Run, source: str) -> None:
    latents = planned(run, "--tp-size", 4, "--dcp-size", 4, "--source", source)["kinds"]["target.latent"]
    assert latents["total_bytes"] == 1_472_200_704
    assert len(set(latents["source_rank_bytes"])) == 1  # replicas share the load


def test_pipeline_stages_send_what_a_layer_split_sends(run: Run) -> None:
    stages, split = (
        planned(run, "--tp-size", 4, "--dcp-size", 4, "--source", source)["kinds"] for source in ("pp:8", "cp:8")
    )
    assert stages == split


def test_the_ranks_of_a_pipeline_stage_share_what_it_sends(run: Run) -> None:
    """Each destination rank reads a stage's layers from one of its replicas, and the draft from the last stage."""
    values = planned(run, "--tp-size", 4, "--dcp-size", 4, "--source", "pp:4x2")
    assert values["source_layers"] == [20, 20, 20, 20, 19, 19, 19, 19]
    latents = values["kinds"]["target.latent"]
    assert latents["num_paths"] == 4 * 4
    assert latents["destination_rank_bytes"] == [368_050_176] * 4
    assert latents["source_rank_bytes"] == [layers * 576 * 32768 // 2 for layers in values["source_layers"]]
    draft = values["kinds"]["draft.latent"]
    assert draft["destination_rank_bytes"] == [576 * 32767] * 4
    assert draft["source_rank_bytes"] == [0] * 6 + [2 * 576 * 32767] * 2


def test_the_tables_fit_into_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = run(*GLM_5_2, "--tp-size", 8, "--dcp-size", 4)
    assert outcome.exit_code == 0
    assert "…" not in outcome.out
    for text in ("target.index_keys", "2.94 GB", "368.05 MB", "25.0%", "47.19 MB", "to 7", "hidden state"):
        assert text in outcome.out


def test_the_figure_is_an_svg_with_a_cell_for_each_path(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    assert run(*GLM_5_2, "--tp-size", 4, "--dcp-size", 4, "--svg", path).exit_code == 0
    figure = ET.parse(path).getroot()
    texts = [element.text or "" for element in figure.iter() if element.tag.endswith("text")]
    assert sum(text == "47.19 MB" for text in texts) == 6 * 4
    assert any(text.startswith("target.latent: 1.47 GB in 32 paths") for text in texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--source", "ep:2"), "source must be cp:N, pp:N, pp:NxT, tp:N or dcp:N"),
        (("--source", "cp"), "source must be cp:N, pp:N, pp:NxT, tp:N or dcp:N"),
        (("--source", "pp:0x2"), "source must be cp:N, pp:N, pp:NxT, tp:N or dcp:N"),
        (("--source", "tp:2x2"), "source must be cp:N, pp:N, pp:NxT, tp:N or dcp:N"),
        (("--tp-size", 4, "--dcp-size", 3), "dcp_size must divide tp_size"),
        (("--prefix", 32768), "prefix must be 0..tokens - 1"),
        (("--kv-format", "int4"), "kv_format must be one of"),
        (("--layout", "token-major"), "layout must be one of"),
        (("--page-size", 3), "page_size must be a power of two"),
        (("--svg", "/nowhere/plan.svg"), "cannot write /nowhere/plan.svg"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(run: Run, options: tuple[Any, ...], message: str) -> None:
    outcome = run(*GLM_5_2, *options)
    assert outcome.exit_code != 0
    assert message in outcome.err
