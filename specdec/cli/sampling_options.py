"""Every sampling parameter as a flag; one that is not given leaves the checkpoint's default."""

import re
import reprlib
from functools import partial
from pathlib import Path

from specdec.cli.option_table import OptionTable, TableOption
from specdec.cli.prompts import errors_name, read_text
from specdec.cli.token_id_list import parse_token_ids
from specdec.errors import ConfigError
from specdec.grammar.grammar import Grammar, GrammarKind


def _parse_ids(values: list[str], *, flag: str) -> list[int]:
    return [token_id for value in values for token_id in parse_token_ids(value, flag=flag)]


def _parse_biases(values: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for value in values:
        match = re.fullmatch(r"\s*([0-9]{1,18})\s*:\s*(\S+)\s*", value)
        try:
            if match is None:
                raise ValueError
            token_id, bias = int(match[1]), float(match[2])
        except ValueError:
            raise ConfigError(f"--logit-bias takes ID:VALUE, as in 42:-1.5; got {reprlib.repr(value)}") from None
        if token_id in biases and biases[token_id] != bias:
            raise ConfigError(f"--logit-bias gives token {token_id} both {biases[token_id]:g} and {bias:g}")
        biases[token_id] = bias
    return biases


def _read_schema(path: str) -> Grammar:
    with errors_name(path):
        return Grammar(kind=GrammarKind.JSON_SCHEMA, source=read_text(Path(path)))


def _ids_option(name: str, help_: str) -> TableOption:
    parse = partial(_parse_ids, flag="--" + name.replace("_", "-"))
    return TableOption(name=name, type=list[str], help=help_, metavar="ID,ID,...", parse=parse)


SAMPLING_OPTIONS = OptionTable(
    "Sampling",
    (
        TableOption(name="max_tokens", type=int, help="Most tokens to emit; else up to the context limit."),
        TableOption(name="min_tokens", type=int, help="No stop takes effect in the first tokens."),
        TableOption(name="temperature", type=float, help="Divides the logits; 0 takes the most likely token."),
        TableOption(name="top_p", type=float, help="Keep the most likely tokens up to this mass."),
        TableOption(name="top_k", type=int, help="Keep this many most likely tokens; 0 keeps all."),
        TableOption(name="min_p", type=float, help="Drop tokens below this fraction of the most likely one."),
        TableOption(name="seed", type=int, help="Same seed, same text, at any number of draft tokens."),
        TableOption(name="n", type=int, help="Choices to generate from each prompt."),
        TableOption(name="stop", type=list[str], help="String that ends the text; repeatable.", metavar="TEXT"),
        _ids_option("stop_token_ids", "Ids that end the text, beside the checkpoint's own."),
        TableOption(name="ignore_eos", type=bool, help="Go on after the checkpoint's end-of-sequence ids."),
        TableOption(name="include_stop_in_output", type=bool, help="Keep the stop in the text."),
        TableOption(name="skip_special_tokens", type=bool, switches_off=True, help="Show special tokens in the text."),
        TableOption(name="repetition_penalty", type=float, help="Weakens tokens of prompt and output; 1 is off."),
        TableOption(name="presence_penalty", type=float, help="Subtracted from logits of tokens of the output."),
        TableOption(name="frequency_penalty", type=float, help="Subtracted once per occurrence in the output."),
        TableOption(
            name="logit_bias",
            type=list[str],
            help="Added to the logit of one id; repeatable.",
            metavar="ID:VALUE",
            parse=_parse_biases,
        ),
        _ids_option("banned_token_ids", "Ids that are never emitted."),
        _ids_option("allowed_token_ids", "Only these ids are emitted."),
        TableOption(
            name="json_schema",
            type=str,
            help="The text is JSON that this schema describes; reasoning before it is free.",
            metavar="FILE.json",
            parse=_read_schema,
            sets="grammar",
        ),
        TableOption(
            name="json_object",
            type=bool,
            help="The text is a JSON object.",
            parse=lambda _given: Grammar.json_object(),
            sets="grammar",
        ),
        TableOption(
            name="regex",
            type=str,
            help="The text matches this expression.",
            metavar="PATTERN",
            parse=Grammar.regex,
            sets="grammar",
        ),
        TableOption(name="logprobs", type=int, help="Report this many alternatives beside each token."),
        TableOption(name="prompt_logprobs", type=int, help="The same for the tokens of the prompt."),
    ),
)
