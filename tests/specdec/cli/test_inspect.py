import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from specdec.cli.inspect import compact_ranges, inspect
from specdec.kernels.errors import ConfigError
from tests.support.tiny_checkpoint import tiny_spec, write_tiny_checkpoint

app = typer.Typer()
app.command()(inspect)


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "120"})
    assert result.exit_code == 0
    return result.output


def test_a_release_is_shown_without_any_file() -> None:
    output = output_of("GLM-5.2-FP8")
    for fact in ("118,629", "59,044", "755,617,140,416", "753,329,940,480", "21: 0-2, 6, 10", "154820"):
        assert fact in output


def test_json_is_one_object() -> None:
    values = json.loads(output_of("glm-5", "--json"))
    assert values["num_tensors"] == 59_870
    assert values["source"] == "config"


def test_a_checkpoint_is_shown_with_what_is_left_out(tmp_path: Path) -> None:
    spec = tiny_spec("share", mtp_copies=True, config_changes={"eos_token_id": [477]})
    output = output_of(str(write_tiny_checkpoint(tmp_path, spec)))
    for fact in ("file headers", "Tensors not used", "model.layers.4.embed_tokens.weight", "477 [MASK]"):
        assert fact in output
    assert "warning" not in output


def test_a_missing_mtp_layer_is_a_warning(tmp_path: Path) -> None:
    output = output_of(str(write_tiny_checkpoint(tmp_path, tiny_spec("share", mtp=False))))
    assert "warning: no MTP layer" in output


def test_an_unknown_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="neither a directory"):
        CliRunner().invoke(app, ["no-such-model"], catch_exceptions=False)


@pytest.mark.parametrize(("layers", "text"), [([], ""), ([0], "0"), ([0, 1, 2, 6], "0-2, 6"), ([3, 5, 6], "3, 5-6")])
def test_layers_are_written_as_ranges(layers: list[int], text: str) -> None:
    assert compact_ranges(layers) == text
