"""Routes for those who watch a server: is it alive, does it take requests, which version is it, what has it done."""

from importlib import metadata

from fastapi import APIRouter
from starlette.responses import Response

from specdec.serving.api_errors import unavailable
from specdec.serving.metrics import ServerMetrics
from specdec.serving.service import Service
from specdec.serving.web.json_response import JsonResponse


def status_routes(service: Service, metrics: ServerMetrics) -> APIRouter:
    """Give `/health`, `/ready`, `/version` and `/metrics`; none of them asks for a key or tells what users wrote."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        try:
            service.driver.check()
        except Exception as error:
            raise unavailable(f"the engine is not healthy: {type(error).__name__}") from error
        return JsonResponse({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        return JsonResponse({"status": "ready", "prefills": service.check_ready()})

    @router.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": metadata.version("specdec")})

    @router.get("/metrics")
    async def read_metrics() -> Response:
        return Response(await metrics.render(), media_type=metrics.content_type)

    return router
