"""The body of `/v1/chat/completions`."""

from typing import Any

from specdec.serving.api_errors import refused
from specdec.serving.chat import ChatTask
from specdec.serving.messages import check_messages
from specdec.serving.openai_api.fields import FIELD_OF, GenerationFields
from specdec.serving.openai_api.response_format import read_response_format
from specdec.serving.thinking import ThinkingWish
from specdec.serving.tool_use import read_tool_use

UNSUPPORTED = {
    "audio": "replies are text",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "web_search_options": "give the model a tool that searches",
}


class ChatRequest(GenerationFields, kw_only=True):
    """What a chat asks for.

    Attributes:
        messages: The conversation.
        max_completion_tokens: Another name of `max_tokens`.
        logprobs: Whether to report the log-probability of every token.
        top_logprobs: Alternatives to report beside it.
        tools: Functions that may be called.
        tool_choice: "auto", "none", "required", a named function, or some allowed ones.
        parallel_tool_calls: Whether a reply may have several calls; true where not given.
        response_format: What the answer must look like.
        enable_thinking: Whether to think, where the checkpoint's template reads it.
        reasoning_effort: How much to think, where the checkpoint's template reads it.
        chat_template_kwargs: More variables for the template.
        modalities: Only text.
    """

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None

    def task(self) -> ChatTask:
        """Give what is asked for.

        Raises:
            ApiError: 400; names the field that is wrong.
        """
        if self.modalities not in (None, ["text"]):
            raise refused("modalities", 'modalities must be ["text"]')
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "top_logprobs goes with logprobs: true")
        field_of = {**FIELD_OF, "logprobs": "top_logprobs"}
        max_tokens = self.max_tokens
        if self.max_completion_tokens is not None:
            if max_tokens not in (None, self.max_completion_tokens):
                raise refused("max_tokens", "max_tokens and max_completion_tokens are one thing, with two values")
            max_tokens = self.max_completion_tokens
            field_of["max_tokens"] = "max_completion_tokens"
        return ChatTask(
            messages=check_messages(self.messages),
            tools=read_tool_use(self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls is not False),
            thinking=ThinkingWish(self.enable_thinking, self.reasoning_effort, self.chat_template_kwargs),
            reply_format=read_response_format(self.response_format),
            sampling={
                **self.sampling(),
                "max_tokens": max_tokens,
                "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            },
            field_of=field_of,
            cache_salt=self.cache_salt,
            priority=self.priority or 0,
            timeout_s=self.timeout_s,
            call_prefix="call_",
        )
