import re
from pathlib import Path
from typing import Any

import pytest

from specdec.kernels.errors import ConfigError
from specdec.models.glm.released import locate_checkpoint, locate_model, released_names
from tests.support.tiny_checkpoint import tiny_spec, write_tiny_checkpoint


def test_every_released_name_but_the_shipped_checkpoint_is_a_config() -> None:
    assert released_names() == (
        "glm-5",
        "glm-5-fp8",
        "glm-5.1",
        "glm-5.1-fp8",
        "glm-5.2",
        "glm-5.2-fp8",
        "glm-5.3",
        "glm-5.3-bf16",
        "glm-tiny",
    )
    for name in released_names()[:-1]:
        location = locate_model(name)
        assert location.directory is None
        assert location.config_path.is_file()


@pytest.mark.parametrize("name", ["glm-5.2-fp8", "GLM-5.2-FP8", "zai-org/GLM-5.2-FP8"])
def test_names_are_found_in_any_case_and_with_their_organisation(name: str) -> None:
    assert locate_model(name).name == "glm-5.2-fp8"


def test_a_checkpoint_directory_has_weights_and_a_config_alone_has_none(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share"))
    assert locate_model(tmp_path).directory == tmp_path
    assert locate_checkpoint(tmp_path) == tmp_path
    assert locate_model(tmp_path / "config.json").directory is None
    (tmp_path / "model.safetensors").unlink()
    assert locate_model(tmp_path).directory is None


def test_a_path_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_checkpoint(tmp_path / "glm-5", tiny_spec("share"))
    monkeypatch.chdir(tmp_path)
    assert locate_model("glm-5").directory == Path("glm-5")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("glm-5.2-fp", "did you mean glm-5.2-fp8?"),
        ("glm-5.3-fp8", "glm-5.3 is the FP8 release"),
        ("llama", "give a directory or one of these names"),
    ],
)
def test_an_unknown_model_is_refused_with_help(model: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        locate_model(model)
    assert repr(model) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("model", ["", "  ", 5, None])
def test_what_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"must be a directory, a config file or a release, got {model!r}")):
        locate_model(model)


@pytest.mark.parametrize("model", ["m" * 5000, "a\0b", "~nobody-of-this-name/model"])
def test_what_can_be_no_path_is_refused_in_a_short_message(model: str) -> None:
    with pytest.raises(ConfigError, match="neither a directory, a config file nor a release") as error:
        locate_model(model)
    assert len(str(error.value)) < 600


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        locate_model(tmp_path)


def test_a_release_has_no_weights_here() -> None:
    with pytest.raises(ConfigError, match="has no weights here"):
        locate_checkpoint("glm-5.2-fp8")
