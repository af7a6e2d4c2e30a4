"""The flags by which other engines set the number of draft tokens, wherever they mean the same here.

All of them are read into one number K, the drafts of a round; two that disagree are an error.
"""

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from specdec.cli.option_table import OptionTable, TableOption
from specdec.errors import ConfigError

_AUTO = "auto"
_MOST_AUTO_DRAFTS = 5  # what auto alone may take
_MTP_ALGORITHMS = ("EAGLE", "NEXTN")  # SGLang's two names for drafting with the checkpoint's own MTP layer
_MTP_METHODS = ("mtp", "deepseek_mtp")  # vLLM's, the second one deprecated there

SPECULATION_OPTIONS = OptionTable(
    "Speculation",
    (
        TableOption(
            name="num_draft_tokens",
            type=str,
            help="Drafts per round, K; 0 is off; auto, or auto:K for at most K, chooses in each round [default: 3].",
            metavar="K",
        ),
        TableOption(name="num_speculative_tokens", type=int, help="The same as --num-draft-tokens."),
        TableOption(
            name="speculative_algorithm", type=str, help="EAGLE or NEXTN: the MTP layer drafts.", metavar="NAME"
        ),
        TableOption(name="speculative_num_steps", type=int, help="The same as --num-draft-tokens."),
        TableOption(name="speculative_eagle_topk", type=int, help="Only 1: drafts are a chain, not a tree."),
        TableOption(name="speculative_num_draft_tokens", type=int, help="One more than --num-draft-tokens."),
        TableOption(
            name="speculative_config",
            type=str,
            help='As in \'{"method": "mtp", "num_speculative_tokens": 3}\'.',
            metavar="JSON",
        ),
    ),
)


def is_draft_length_auto(given: Mapping[str, Any]) -> bool:
    """Whether the flags leave it to each round how many drafts it takes."""
    return str(given.get("num_draft_tokens")).startswith(_AUTO)


def resolve_num_draft_tokens(given: Mapping[str, Any]) -> int | None:
    """Read K from every flag of `SPECULATION_OPTIONS` that was given.

    Returns:
        None where no flag names a number: the default then holds.

    Raises:
        ConfigError: A flag asks for what does not exist here, or two flags disagree.
    """
    claims: list[tuple[str, int]] = []
    for option in SPECULATION_OPTIONS.options:
        if option.name in given:
            drafts = _drafts_of(option.name, option.flag, given[option.name])
            if drafts is not None:
                claims.append((f"{option.flag} {given[option.name]}", drafts))
    for shown, drafts in claims[1:]:
        if drafts != claims[0][1]:
            raise ConfigError(
                f"{claims[0][0]} means {claims[0][1]} draft tokens and {shown} means {drafts}: give one of them"
            )
    if "speculative_algorithm" in given and claims and claims[0][1] == 0:
        name = given["speculative_algorithm"]
        raise ConfigError(f"--speculative-algorithm {name} switches speculation on and {claims[0][0]} off: drop one")
    return claims[0][1] if claims else None


def _drafts_of(name: str, flag: str, value: Any) -> int | None:
    """K as one flag gives it; None for a flag that only allows speculation."""
    match name:
        case "speculative_algorithm":
            if value.upper() not in _MTP_ALGORITHMS:
                raise ConfigError(
                    f"{flag} must be one of {', '.join(_MTP_ALGORITHMS)}: the checkpoint's MTP layer is the only "
                    f"draft; got {value!r}"
                )
            return None
        case "speculative_eagle_topk":
            if value != 1:
                raise ConfigError(f"{flag} must be 1: drafts are a chain, there are no draft trees; got {value}")
            return None
        case "speculative_num_draft_tokens":
            if value < 1:
                raise ConfigError(f"{flag} counts the last token too and must be >= 1, got {value}")
            return int(value) - 1
        case "speculative_config":
            return _drafts_of_json(flag, value)
        case "num_draft_tokens":
            return _most_drafts_of(flag, value)
        case _:
            if value < 0:
                raise ConfigError(f"{flag} must be >= 0, got {value}")
            return int(value)


def _most_drafts_of(flag: str, text: str) -> int:
    """K of a number, of auto, or of auto:K."""
    number = text.removeprefix(f"{_AUTO}:") if text != _AUTO else str(_MOST_AUTO_DRAFTS)
    if not number.isdecimal():
        raise ConfigError(f"{flag} must be an integer >= 0, {_AUTO} or {_AUTO}:K, got {text!r}")
    return int(number)


def _drafts_of_json(flag: str, text: str) -> int | None:
    """K of vLLM's speculative config; None where it leaves the number out."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} must be a JSON object, got {reprlib.repr(text)}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text!r}")
    for key in config:
        if key not in ("method", "num_speculative_tokens"):
            raise ConfigError(f"{flag} takes method and num_speculative_tokens; {key!r} is not implemented")
    method = config.get("method")
    if method not in _MTP_METHODS:
        raise ConfigError(f'{flag} needs "method": "mtp", the only draft there is; got {method!r}')
    drafts = config.get("num_speculative_tokens")
    if drafts is not None and (not isinstance(drafts, int) or isinstance(drafts, bool) or drafts < 0):
        raise ConfigError(f"{flag}: num_speculative_tokens must be an integer >= 0, got {drafts!r}")
    return drafts
