"""What must be known of a server before prompts can be sent to it, found out by asking."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.bench.prompt_writer import PromptForm
from specdec.bench.server import Answer, Server
from specdec.bench.words import WORDS
from specdec.errors import ConfigError, SpecdecError

_REFUSALS = frozenset({400, 404, 405, 415, 422, 501})

# From the most telling to what every server takes; the first is vLLM's, and others have it too.
STREAM_FIELDS: Sequence[Mapping[str, Any]] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True},
    {"stream_options": {"include_usage": True}},
    {},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """How prompts can be sent to a server.

    Attributes:
        model: Name to ask for.
        form: How prompts are sent.
        vocabulary: Token ids that prompts may be made of; empty unless `form` is IDS.
        stream_fields: What a request may have so that the stream tells more.
        max_model_len: Tokens of a prompt and its reply together; None if the server does not say.
    """

    model: str
    form: PromptForm
    vocabulary: tuple[int, ...]
    stream_fields: Mapping[str, Any]
    max_model_len: int | None


async def ask_server(
    server: Server, *, model: str | None, form: PromptForm | None, vocab_size: int | None, has_text: bool
) -> ServerFacts:
    """Find out how prompts can be sent: token ids where the server takes them, else text, else messages.

    Sends requests for one token.

    Args:
        server: The server.
        model: Name of the model; None takes the first that the server names.
        form: The only form to try; None for the best that works.
        vocab_size: Ids below it are tokens of the model; None asks the server for the ids of common words.
        has_text: Prompts hold text: they are sent as messages, if `form` does not say otherwise.

    Raises:
        ConfigError: The server refuses every form.
        ServerGoneError: It cannot be reached.
        SpecdecError: It answers with an error that is none of the request's.
    """
    if form is PromptForm.IDS and has_text:
        raise ConfigError("--prompt-form ids is for traces: questions are text, which is sent as chat or text")
    name, max_model_len = await _find_model(server, model)
    if form is None:
        forms: tuple[PromptForm, ...] = (PromptForm.CHAT,) if has_text else tuple(PromptForm)
    else:
        forms = (form,)
    refusals = []
    for candidate in forms:
        vocabulary: tuple[int, ...] = ()
        if candidate is PromptForm.IDS:
            vocabulary = await _find_vocabulary(server, name, vocab_size)
            if not vocabulary:
                refusals.append("ids: the server has no /tokenize to tell token ids (give --vocab-size)")
                continue
        for stream_fields in STREAM_FIELDS:
            answer = await _try(server, candidate, {"model": name, **stream_fields}, vocabulary)
            if answer.is_ok:
                return ServerFacts(
                    model=name,
                    form=candidate,
                    vocabulary=vocabulary,
                    stream_fields=stream_fields,
                    max_model_len=max_model_len,
                )
        refusals.append(f"{candidate}: HTTP {answer.status}, {answer.detail}")
    raise ConfigError(f"{server.url} takes no prompt for the model {name!r} ({'; '.join(refusals)})")


async def _find_model(server: Server, wanted: str | None) -> tuple[str, int | None]:
    answer = await server.ask("v1/models")
    _refuse_other_faults(server, answer)
    listed = answer.fields.get("data")
    models = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    chosen = next((each for each in models if wanted is None or each.get("id") == wanted), {})
    name = wanted or chosen.get("id")
    if not isinstance(name, str):
        raise ConfigError(f"{server.url}/v1/models names no model (HTTP {answer.status}): give --model")
    max_model_len = chosen.get("max_model_len")
    return name, max_model_len if isinstance(max_model_len, int) else None


async def _find_vocabulary(server: Server, model: str, vocab_size: int | None) -> tuple[int, ...]:
    """Ids of ordinary tokens; none where they cannot be told."""
    if vocab_size is not None:
        return tuple(range(vocab_size))
    text = " " + " ".join(WORDS)
    answer = await server.ask("tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    tokens = answer.fields.get("tokens") if answer.is_ok else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        return ()
    return tuple(sorted(set(tokens)))


async def _try(server: Server, form: PromptForm, fields: dict[str, Any], vocabulary: tuple[int, ...]) -> Answer:
    """Ask for one token, streamed."""
    prompt: dict[str, Any] = {"prompt": f" {WORDS[0]} {WORDS[1]}"}
    if form is PromptForm.IDS:
        prompt = {"prompt": [vocabulary[0], vocabulary[-1]]}
    elif form is PromptForm.CHAT:
        prompt = {"messages": [{"role": "user", "content": WORDS[0]}]}
    answer = await server.ask(form.path, {**fields, **prompt, "max_tokens": 1, "stream": True})
    _refuse_other_faults(server, answer)
    return answer


def _refuse_other_faults(server: Server, answer: Answer) -> None:
    """Pass what was served and what was refused for what it asks; anything else another form would meet too."""
    if answer.status in (401, 403):
        raise ConfigError(f"{server.url} refuses the API key (HTTP {answer.status}): give --api-key; {answer.detail}")
    if not answer.is_ok and answer.status not in _REFUSALS:
        raise SpecdecError(f"{server.url} answers HTTP {answer.status}: {answer.detail}")
