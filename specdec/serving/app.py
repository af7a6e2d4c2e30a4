"""The application: routes, layers around them, and errors in the shape of the API that was called."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from specdec.errors import SpecdecError
from specdec.serving.anthropic_api.routes import anthropic_routes
from specdec.serving.api_errors import ApiError, api_error_of
from specdec.serving.engine_gauges import EngineGauges
from specdec.serving.metrics import ServerMetrics
from specdec.serving.openai_api.routes import openai_routes
from specdec.serving.openai_api.text_routes import text_routes
from specdec.serving.service import Service
from specdec.serving.status import status_routes
from specdec.serving.web.api_keys import ApiKeys
from specdec.serving.web.json_response import JsonResponse
from specdec.serving.web.request_log import RequestLog

_MESSAGES_PATH = "/v1/messages"


def create_app(service: Service, read_gauges: Callable[[], EngineGauges]) -> ASGIApp:
    """Put the application together.

    Args:
        service: What is served; started and closed with the application.
        read_gauges: Reads the engine, between two rounds.
    """
    settings = service.settings
    metrics = ServerMetrics(service.driver, read_gauges, model_name=settings.model_names[0])
    service.admission.on_piece = metrics.observe_piece

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close()

    app = FastAPI(title="specdec", openapi_url=None, lifespan=lifespan)
    app.include_router(status_routes(service, metrics))
    keys = ApiKeys(settings.api_keys)

    async def check_key(request: Request) -> None:
        keys.check(request)

    guarded = [Depends(check_key)]
    if service.answers_requests:
        app.include_router(openai_routes(service), prefix="/v1", dependencies=guarded)
        app.include_router(anthropic_routes(service), prefix="/v1", dependencies=guarded)
        app.include_router(text_routes(service), dependencies=guarded)
    for kind in (ApiError, SpecdecError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-specdec-ignored-fields"],
        )
    return RequestLog(app, on_response=metrics.observe_response)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # of the router: no such path, or not by this method
        message = f"{request.method} {request.url.path[:128]}: {error.detail.lower()}"
        failure = ApiError(error.status_code, message, headers=error.headers)
    else:
        failure = api_error_of(error)
    is_messages = request.url.path.startswith(_MESSAGES_PATH)
    body = failure.anthropic_body(request.state.request_id) if is_messages else failure.openai_body()
    return JsonResponse(body, status_code=failure.status, headers=failure.headers)
