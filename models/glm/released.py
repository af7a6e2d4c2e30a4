"""Find a model by what a user types: a directory, a config.json, or the name of a release.

The configs of all GLM-5.x releases are part of the package, so that they can be inspected without any file; `glm-tiny`
is a small trained checkpoint that is part of it as a whole.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

from specdec.kernels.errors import ConfigError

GLM_TINY = "glm-tiny"

_PACKAGE = Path(__file__).parent
_CONFIGS = _PACKAGE / "configs"
_TINY_DIRECTORY = _PACKAGE / "glm_tiny"
_ORGANISATION = "zai-org/"
_LONGEST_SHOWN = 200
_HINTS = {"glm-5.3-fp8": "glm-5.3 is the FP8 release, glm-5.3-bf16 the unquantised one"}


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Where a model is.

    Attributes:
        name: The release, or the path as it was given.
        config_path: Its config.json.
        directory: The directory that holds the weights, tokenizer and template too; None when only the config is known.
    """

    name: str
    config_path: Path
    directory: Path | None


def released_names() -> tuple[str, ...]:
    """Names that `locate_model` knows without any file."""
    names = sorted(path.stem for path in _CONFIGS.glob("*.json"))
    return (*names, GLM_TINY)


def locate_model(model: str | Path) -> ModelLocation:
    """Find a model; a path that exists comes before a name.

    Args:
        model: A checkpoint directory, the path of a config.json, or a released name such as "glm-5.2-fp8" or
            "zai-org/GLM-5.2-FP8", in any case.

    Raises:
        ConfigError: It is none of these.
    """
    if not isinstance(model, str | Path) or not str(model).strip():
        raise ConfigError(
            f"model must be a directory, a config file or a release, got {model!r} "
            f"(releases: {', '.join(released_names())})"
        )
    path = _existing_path(model)
    if path is not None and path.is_dir():
        config_path = path / "config.json"
        if not config_path.is_file():
            raise ConfigError(f"{path} holds no config.json; give the directory of a checkpoint")
        return ModelLocation(str(model), config_path, path if any(path.glob("*.safetensors")) else None)
    if path is not None:
        return ModelLocation(str(model), path, None)
    name = str(model).lower().removeprefix(_ORGANISATION)
    if name == GLM_TINY and _TINY_DIRECTORY.is_dir():
        return ModelLocation(GLM_TINY, _TINY_DIRECTORY / "config.json", _TINY_DIRECTORY)
    config_path = _CONFIGS / f"{name}.json"
    if name in released_names() and config_path.is_file():
        return ModelLocation(name, config_path, None)
    shown = str(model) if len(str(model)) <= _LONGEST_SHOWN else f"{str(model)[:_LONGEST_SHOWN]}..."
    close = difflib.get_close_matches(name, released_names(), n=1)
    hint = _HINTS.get(name) or (f"did you mean {close[0]}?" if close else "give a directory or one of these names")
    raise ConfigError(
        f"model {shown!r} is neither a directory, a config file nor a release; {hint} "
        f"(releases: {', '.join(released_names())})"
    )


def locate_checkpoint(model: str | Path) -> Path:
    """The directory of a model whose weights are on disk.

    Raises:
        ConfigError: It cannot be found, or only its config is known.
    """
    location = locate_model(model)
    if location.directory is None:
        raise ConfigError(
            f"model {str(model)!r} has no weights here, only {location.config_path}; download the checkpoint and give "
            f"its directory, or use {GLM_TINY}, which is part of the package"
        )
    return location.directory


def _existing_path(model: str | Path) -> Path | None:
    """The directory or file of this path; None where there is none, or where it can be no path at all."""
    try:
        path = Path(model).expanduser()
        return path if path.is_dir() or path.is_file() else None
    except (OSError, RuntimeError, ValueError):  # a name too long, a home of nobody, a zero byte
        return None
