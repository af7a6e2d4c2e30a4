"""The routes of the Anthropic API."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from specdec.serving.anthropic_api.reply import MessageAnswer, error_event
from specdec.serving.anthropic_api.request import CountTokensRequest, MessagesRequest
from specdec.serving.arrival import Arrival
from specdec.serving.chat import RunningChat, prompt_of, start_chat
from specdec.serving.service import Service
from specdec.serving.web.body import decode_body, ignored_header
from specdec.serving.web.generated_response import generated_response
from specdec.serving.web.json_response import JsonResponse


def anthropic_routes(service: Service) -> APIRouter:
    """Give the routes below `/v1`."""
    router = APIRouter()

    @router.post("/messages")
    async def messages(request: Request) -> Response:
        arrival = Arrival.of(request)
        body = await service.read(request)

        def start() -> tuple[bool, str, RunningChat, dict[str, str]]:
            asked, ignored = decode_body(body, MessagesRequest)
            model = service.model_name(asked.model)
            chat = start_chat(service, asked.task(), arrival=arrival)
            return bool(asked.stream), model, chat, ignored_header([*ignored, *chat.without_effect])

        is_stream, model, chat, headers = await service.in_worker(start)
        answer = MessageAnswer(answer_id=f"msg_{arrival.request_id}", model=model, chat=chat)
        return await generated_response(
            request,
            chat.generation,
            answer.events() if is_stream else answer.whole(),
            error_event=partial(error_event, request_id=arrival.request_id),
            headers=headers,
        )

    @router.post("/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = await service.read_body(request)

        def answer() -> Response:
            asked, ignored = decode_body(body, CountTokensRequest)
            service.model_name(asked.model)
            prompt, without_effect = prompt_of(service, asked.task())
            return JsonResponse({"input_tokens": len(prompt)}, headers=ignored_header([*ignored, *without_effect]))

        return await service.in_worker(answer)

    return router
