"""Token ids in the files beside the weights, and whether the model has them.

The tokenizer and generation_config.json come as files of their own, so they can be those of another checkpoint.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from tokenizers.decoders import ByteLevel

from specdec.kernels.errors import CheckpointError
from specdec.models.glm.json_files import read_optional_json_object

if TYPE_CHECKING:  # it loads torch, which a tokenizer alone does not need
    from specdec.models.glm.config import GlmConfig

GENERATION_CONFIG_NAME = "generation_config.json"
TOKENIZER_NAME = "tokenizer.json"


def open_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json.

    Raises:
        CheckpointError: The file is missing or corrupt, or is no byte-level tokenizer.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; text needs it, token ids can be given without") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: not a valid tokenizer: {error}") from error
    if not isinstance(tokenizer.decoder, ByteLevel):
        found = type(tokenizer.decoder).__name__
        raise CheckpointError(f"{path}: the decoder must be ByteLevel, as in every GLM-5 checkpoint, got {found}")
    return tokenizer


def tokenizer_vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    """One more than the highest id that has a token."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def generation_end_ids(directory: Path) -> tuple[int, ...]:
    """Ids at which the generation_config.json of a checkpoint ends a turn, as they stand; none without the file.

    Raises:
        CheckpointError: The file is corrupt.
    """
    path = directory / GENERATION_CONFIG_NAME
    found = read_optional_json_object(path).get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
        raise CheckpointError(f"{path}: eos_token_id must be an id or a list of ids, got {found!r}")
    return tuple(ids)


def check_end_ids(config: "GlmConfig", directory: Path) -> None:
    """Refuse a generation_config.json that ends a turn at ids the model does not have.

    Raises:
        CheckpointError: It does, or is corrupt.
    """
    fault = _end_id_fault(config, directory)
    if fault is not None:
        raise CheckpointError(fault)


def vocabulary_faults(config: "GlmConfig", directory: Path) -> tuple[str, ...]:
    """Ids in the files of a directory that are beyond the model's vocabulary, as sentences.

    Raises:
        CheckpointError: A file is corrupt.
    """
    faults = [_end_id_fault(config, directory), _tokenizer_fault(config, directory)]
    return tuple(fault for fault in faults if fault is not None)


def _end_id_fault(config: "GlmConfig", directory: Path) -> str | None:
    beyond = [token_id for token_id in generation_end_ids(directory) if token_id >= config.vocab_size]
    if not beyond:
        return None
    return (
        f"{directory / GENERATION_CONFIG_NAME}: eos_token_id {beyond[0]} is outside the vocabulary, vocab_size "
        f"{config.vocab_size} in config.json; the two files belong to different checkpoints"
    )


def _tokenizer_fault(config: "GlmConfig", directory: Path) -> str | None:
    path = directory / TOKENIZER_NAME
    if not path.exists():
        return None
    size = tokenizer_vocab_size(open_tokenizer(path))
    if size <= config.vocab_size:
        return None
    return (
        f"{path}: has token ids up to {size - 1}, vocab_size in config.json is {config.vocab_size}: texts with higher "
        "ids are refused; the two files belong to different checkpoints"
    )
