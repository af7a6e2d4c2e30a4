"""Options of `specdec bench`: what is sent, when, and what is reported."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from specdec.cli.option_table import OptionTable, TableOption
from specdec.errors import ConfigError


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {text}")
    return value


SYNTHETIC_OPTIONS = OptionTable(
    "Synthetic prompts (without a workload file)",
    (
        TableOption(name="num_requests", type=int, help="Requests to send."),
        TableOption(name="input_tokens", type=int, help="Tokens of a prompt."),
        TableOption(name="output_tokens", type=int, help="Tokens to ask for; of questions too (default: 256)."),
        TableOption(name="shared_tokens", type=int, help="Tokens that all prompts begin with (default: 0)."),
        TableOption(name="length_spread", type=float, help="Lengths vary by this share, 0 to 1 (default: 0)."),
    ),
)

LIMIT_OPTIONS = OptionTable(
    "Limits of a workload",
    (
        TableOption(name="scale_length", type=float, help="Divide the lengths of a trace by this (default: 1)."),
        TableOption(name="max_requests", type=int, help="Send the first of them only."),
        TableOption(
            name="max_context", type=int, help="Leave out requests with more tokens, prompt and reply together."
        ),
    ),
)

ARRIVAL_OPTIONS = OptionTable(
    "Arrivals of sessions",
    (
        TableOption(
            name="arrivals",
            type=Literal["trace", "poisson", "fixed", "closed"],
            help="trace, poisson and fixed do not wait for the server; closed starts a session when one has ended "
            "(default: trace where the workload has times, else closed).",
        ),
        TableOption(name="rate", type=float, help="Sessions a second, with poisson and fixed."),
        TableOption(name="concurrency", type=int, help="Sessions at the same time, with closed (default: 1)."),
        TableOption(name="speed", type=float, help="Play the times of a trace this much faster (default: 1)."),
        TableOption(name="max_think_time", type=float, help="Longest wait behind a reply, in seconds of the trace."),
    ),
)

REQUEST_OPTIONS = OptionTable(
    "Requests",
    (
        TableOption(
            name="prompt_form",
            type=Literal["ids", "text", "chat"],
            help="Token ids or text for /v1/completions, or messages for /v1/chat/completions "
            "(default: the first of them that the server takes; questions are chat).",
        ),
        TableOption(name="vocab_size", type=int, help="Send token ids below this (default: ask /tokenize for some)."),
        TableOption(name="temperature", type=float, help="Of sampling (default: the server's)."),
        TableOption(name="ignore_eos", type=bool, help="Ask for replies as long as planned, past an end of sequence."),
        TableOption(name="extra_body", type=str, help="More fields of every request.", metavar="JSON", parse=_object),
        TableOption(name="timeout", type=float, help="Seconds that a reply may take (default: 600)."),
        TableOption(name="warmup", type=int, help="Requests to send before, not reported (default: 0)."),
        TableOption(name="seed", type=int, help="Of prompts and arrivals (default: 0)."),
    ),
)

OBJECTIVE_OPTIONS = OptionTable(
    "Objectives for the goodput",
    (
        TableOption(name="slo_ttft", type=float, help="Milliseconds to the first token.", metavar="MS"),
        TableOption(name="slo_tpot", type=float, help="Milliseconds for each token behind it.", metavar="MS"),
    ),
)
