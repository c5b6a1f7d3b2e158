"""`create_app`: the Starlette application that the BentoML service mounts at `/`.

It stays a plain Starlette instance: BentoML looks through its routes, and wrapped in a middleware the mount would
swallow BentoML's own paths. So every route of ours takes all methods and refuses the wrong ones itself, and the
catch-all covers `/v1` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runners.api.access import Access
from runners.api.admin import AdminModel, AdminModels
from runners.api.chat import ChatCompletions
from runners.api.completions import Completions
from runners.api.docs import Docs, OpenApi
from runners.api.embeddings import Embeddings
from runners.api.endpoint import Endpoint, Exchange
from runners.api.errors import error_body
from runners.api.health import Health, Live, Ready, Version
from runners.api.interfaces import Engine
from runners.api.metrics import Metrics
from runners.api.models import Models
from runners.api.page import Page, Telemetry
from runners.api.prompts import TextThreads
from runners.api.responses import Responses
from runners.api.sessions import Sessions
from runners.api.settings import ApiSettings
from runners.api.tokenize import Detokenize, Tokenize
from runners.errors import MethodNotAllowedError, NotFoundError, WavelaneError
from runners.text.assets import TextAssets


class UnknownPath(Endpoint):
    """Every path under `/v1` that is no route of ours."""

    methods = ()

    async def handle(self, exchange: Exchange) -> None:
        raise NotFoundError(f"Unknown path: {exchange.scope['path']}", code="unknown_path")


_ROUTES: tuple[tuple[str, type[Endpoint]], ...] = (
    ("/v1/completions", Completions),
    ("/v1/chat/completions", ChatCompletions),
    ("/v1/responses", Responses),
    ("/v1/embeddings", Embeddings),
    ("/v1/sessions", Sessions),
    ("/v1/sessions/{session_id:path}", Sessions),
    ("/v1/models", Models),
    ("/v1/models/{model_id:path}", Models),
    ("/tokenize", Tokenize),
    ("/detokenize", Detokenize),
    ("/openapi.json", OpenApi),
    ("/docs", Docs),
    ("/health", Health),
    ("/livez", Live),
    ("/readyz", Ready),
    ("/version", Version),
    ("/metrics", Metrics),
    ("/admin/models", AdminModels),
    ("/admin/models/{model_id:path}", AdminModel),
    ("/v1/{path:path}", UnknownPath),
)

_PAGE_ROUTES: tuple[tuple[str, type[Endpoint]], ...] = (
    ("/", Page),
    ("/page/{file}", Page),
    ("/telemetry", Telemetry),
)


async def _routing_error(request: Request, raised: Exception) -> Response:
    """A path outside ours when the app runs alone."""
    status = raised.status_code if isinstance(raised, HTTPException) else 500
    error: WavelaneError = NotFoundError(f"Unknown path: {request.url.path}", code="unknown_path")
    if status == 405:
        error = MethodNotAllowedError(f"{request.method} is not allowed here.")
    return Response(error_body(error), status_code=error.status, media_type="application/json")


def create_app(
    settings: ApiSettings, engine: Engine | None = None, text: Mapping[str, TextAssets] | None = None
) -> Starlette:
    """The application. `app.state.engine`, `app.state.text` and `app.state.feed` (of the page) may be set later, before
    or while it serves.

    `app.state.text` maps a served model name to its `TextAssets`; a model without an entry runs on token ids alone.
    """
    threads = TextThreads(settings.tokenizer_threads)
    state = State(
        {
            "settings": settings,
            "engine": engine,
            "text": {} if text is None else text,
            "threads": threads,
            "access": Access(settings.keys),
            "admin": None,
            "tracer": None,
            "metrics_text": str,  # the whole server's come from `runners.server`
            "feed": None,
        }
    )
    table = (*_PAGE_ROUTES, *_ROUTES) if settings.page else _ROUTES
    routes = [Route(path, endpoint(state)) for path, endpoint in table]
    for route in routes:
        cast("Endpoint", route.endpoint).route = route.path
    app = Starlette(routes=routes, exception_handlers={HTTPException: _routing_error})
    app.state = state
    return app
