"""The routes of the OpenAI API."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from specdec.serving.arrival import Arrival
from specdec.serving.chat import RunningChat, start_chat
from specdec.serving.generation import Generation
from specdec.serving.openai_api import chat_request, completion_request
from specdec.serving.openai_api.answer import Answer
from specdec.serving.openai_api.chat_reply import ChatAnswer
from specdec.serving.openai_api.chat_request import ChatRequest
from specdec.serving.openai_api.completion_reply import CompletionAnswer
from specdec.serving.openai_api.completion_request import CompletionRequest, token_ids
from specdec.serving.openai_api.errors import error_event
from specdec.serving.openai_api.fields import GenerationFields, StreamOptions, refuse_fields
from specdec.serving.service import Service
from specdec.serving.web.body import decode_body, ignored_header
from specdec.serving.web.generated_response import generated_response
from specdec.serving.web.json_response import JsonResponse


def openai_routes(service: Service) -> APIRouter:
    """Give the routes below `/v1`."""
    router = APIRouter()

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        arrival = Arrival.of(request)
        body = await service.read(request)

        def start() -> tuple[ChatRequest, str, RunningChat, dict[str, str]]:
            asked, ignored = decode_body(body, ChatRequest)
            refuse_fields(ignored, chat_request.UNSUPPORTED)
            model = service.model_name(asked.model)
            chat = start_chat(service, asked.task(), arrival=arrival)
            return asked, model, chat, ignored_header([*ignored, *chat.without_effect])

        asked, model, chat, headers = await service.in_worker(start)
        answer = ChatAnswer(
            answer_id=f"chatcmpl-{arrival.request_id}",
            model=model,
            generation=chat.generation,
            reader=chat.reader,
            tokenizer=service.tokenizer,
            returns_token_ids=bool(asked.return_token_ids),
        )
        return await _respond(request, asked, answer, headers)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        arrival = Arrival.of(request)
        body = await service.read(request)

        def start() -> tuple[CompletionRequest, str, Generation, dict[str, str]]:
            asked, ignored = decode_body(body, CompletionRequest)
            refuse_fields(ignored, completion_request.UNSUPPORTED)
            model = service.model_name(asked.model)
            prompts = asked.prompts()
            params = service.sampling(asked.params(), field_of=asked.field_of)
            generation = service.generate(
                lambda: [token_ids(prompt, service.engine.prompt_ids) for prompt in prompts],
                num_prompts=len(prompts),
                params=params,
                cache_salt=asked.cache_salt,
                priority=asked.priority or 0,
                timeout_s=asked.timeout_s,
                arrival=arrival,
                field_of=asked.field_of,
                prompt_field="prompt",
            )
            return asked, model, generation, ignored_header(ignored)

        asked, model, generation, headers = await service.in_worker(start)
        answer = CompletionAnswer(
            answer_id=f"cmpl-{arrival.request_id}",
            model=model,
            generation=generation,
            tokenizer=service.tokenizer,
            returns_token_ids=bool(asked.return_token_ids),
        )
        return await _respond(request, asked, answer, headers)

    @router.get("/models")
    async def list_models() -> Response:
        return JsonResponse(
            {"object": "list", "data": [_model(service, name) for name in service.settings.model_names]}
        )

    @router.get("/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        return JsonResponse(_model(service, service.model_name(model)))

    return router


async def _respond(request: Request, asked: GenerationFields, answer: Answer, headers: dict[str, str]) -> Response:
    content = answer.chunks(asked.stream_options or StreamOptions()) if asked.stream else answer.whole()
    return await generated_response(request, answer.generation, content, error_event=error_event, headers=headers)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "specdec",
        "max_model_len": service.engine.max_model_len,
    }
