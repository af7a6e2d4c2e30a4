"""Routes that turn text into token ids and back, as other engines have them."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from specdec.serving.api_errors import ApiError, refused
from specdec.serving.messages import check_messages
from specdec.serving.service import Service
from specdec.serving.web.body import decode_body, ignored_header
from specdec.serving.web.json_response import JsonResponse


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """What to turn into token ids: a text, or a conversation.

    Attributes:
        model: A served name; may be left out.
        prompt: The text.
        messages: The conversation.
        tools: Tools of the conversation.
        chat_template_kwargs: More variables for the template.
        return_token_strs: Whether to give the text of every token, too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """What to turn into text.

    Attributes:
        tokens: Token ids.
        model: A served name; may be left out.
    """

    tokens: list[int]
    model: str | None = None


def text_routes(service: Service) -> APIRouter:
    """Give `/tokenize` and `/detokenize`."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await service.read_body(request)

        def answer() -> Response:
            asked, ignored = decode_body(body, TokenizeRequest)
            service.model_name(asked.model)
            tokens = _token_ids(service, asked)
            record: dict[str, Any] = {
                "count": len(tokens),
                "max_model_len": service.engine.max_model_len,
                "tokens": tokens,
            }
            if asked.return_token_strs:
                decode = service.tokenizer.decode
                record["token_strs"] = [decode([token_id], skip_special_tokens=False) for token_id in tokens]
            return JsonResponse(record, headers=ignored_header(ignored))

        return await service.in_worker(answer)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await service.read_body(request)

        def answer() -> Response:
            asked, ignored = decode_body(body, DetokenizeRequest)
            service.model_name(asked.model)
            for place, token_id in enumerate(asked.tokens):
                if not 0 <= token_id < service.tokenizer.vocab_size:
                    most = service.tokenizer.vocab_size - 1
                    raise refused("tokens", f"tokens[{place}] must be an id in 0..{most}, got {token_id}")
            text = service.tokenizer.decode(asked.tokens, skip_special_tokens=False)
            return JsonResponse({"prompt": text}, headers=ignored_header(ignored))

        return await service.in_worker(answer)

    return router


def _token_ids(service: Service, asked: TokenizeRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if asked.prompt is not None:
        return service.tokenizer.encode(asked.prompt)
    assert asked.messages is not None
    return service.chat_prompt(check_messages(asked.messages), tools=asked.tools, variables=asked.chat_template_kwargs)
