"""A chat request, whatever API it came by: prompt, tools, constraints, and the replies that come of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.replies.reply_markup import Marker
from specdec.sampling.sampling_params import SamplingParams
from specdec.serving.api_errors import ApiError
from specdec.serving.arrival import Arrival
from specdec.serving.generation import Generation
from specdec.serving.parsed_reply import ReplyReader
from specdec.serving.reply_constraint import ReplyFormat, ends_with_call, grammar_field, reply_grammar
from specdec.serving.service import Service
from specdec.serving.thinking import ThinkingWish
from specdec.serving.tool_use import ToolUse


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTask:
    """What a chat request asks for.

    Attributes:
        messages: As a template reads them.
        tools: That the model may call.
        thinking: What is wished about thinking.
        reply_format: What the answer must look like; None leaves it free.
        sampling: Sampling parameters by name; None counts as not given.
        field_of: Names of the request's fields by sampling parameter, where they are not the same.
        cache_salt: Keeps KV that is reused to requests that give the same; None shares it with all who give none.
        priority: A lower number goes first.
        timeout_s: Seconds in which it must have ended; None gives it the server's.
        call_prefix: What ids of tool calls begin with.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: ToolUse
    thinking: ThinkingWish
    reply_format: ReplyFormat | None
    sampling: Mapping[str, Any]
    field_of: Mapping[str, str]
    cache_salt: str | None
    priority: int
    timeout_s: float | None
    call_prefix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningChat:
    """A chat request that is being answered.

    Attributes:
        generation: What runs.
        reader: Of its replies.
        without_effect: Fields that the checkpoint's template has no use for.
    """

    generation: Generation
    reader: ReplyReader
    without_effect: Sequence[str]


def prompt_of(service: Service, task: ChatTask) -> tuple[list[int], list[str]]:
    """Render and tokenise the prompt; gives its ids and the fields without effect.

    Raises:
        ApiError: 400; names the field that is wrong.
    """
    if service.thinking is None:
        raise ApiError(400, "the checkpoint has no chat template: use /v1/completions")
    variables, without_effect = service.thinking.variables(task.thinking)
    tools = list(task.tools.shown) or None
    return service.chat_prompt(task.messages, tools=tools, variables=variables), without_effect


def start_chat(service: Service, task: ChatTask, *, arrival: Arrival) -> RunningChat:
    """Let a chat request in and start it; called in a worker thread.

    Raises:
        ApiError: It cannot be served, or not now.
    """
    markup = service.markup
    if task.tools.shown and not markup.has_tool_calls:
        raise ApiError(400, "tools cannot be called: the checkpoint's tokenizer has no tokens for calls", param="tools")
    params = _params(service, task)
    readers: list[ReplyReader] = []
    without_effect: list[str] = []

    def make_prompts() -> list[list[int]]:
        prompt, ignored = prompt_of(service, task)
        without_effect.extend(ignored)
        tools = task.tools.shown
        readers.append(ReplyReader(markup, prompt=prompt, params=params, tools=tools, call_prefix=task.call_prefix))
        return [prompt]

    generation = service.generate(
        make_prompts,
        num_prompts=1,
        params=params,
        arrival=arrival,
        field_of={**task.field_of, "grammar": grammar_field(task.tools, task.reply_format)},
        prompt_field="messages",
        cache_salt=task.cache_salt,
        priority=task.priority,
        timeout_s=task.timeout_s,
    )
    return RunningChat(generation=generation, reader=readers[0], without_effect=without_effect)


def _params(service: Service, task: ChatTask) -> SamplingParams:
    """Give the sampling parameters of a task.

    Raises:
        ApiError: 400; names the field that is wrong.
    """
    grammar = reply_grammar(task.tools, task.reply_format, service.markup)
    wanted = {
        **task.sampling,
        "grammar": grammar,
        # Markers must be seen, whether the tokenizer calls them special or not; the reader takes them out of the text.
        "skip_special_tokens": False,
    }
    if ends_with_call(task.tools, grammar):
        ids = task.sampling.get("stop_token_ids") or ()
        wanted["stop_token_ids"] = [*ids, service.markup.id_by_marker[Marker.END_CALL]]
    return service.sampling(wanted, field_of=task.field_of)
