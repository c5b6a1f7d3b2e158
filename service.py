"""The BentoML service: `bentoml serve service:Wavelane`. All that it serves is `runners`; see `runners/server.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Annotated

import bentoml
from bentoml.exceptions import BentoMLException
from pydantic import Field

from configs.api_keys import ApiKeysError
from configs.loader import ProfileError, load_profile
from runners.api.protocol import CompletionRequest
from runners.errors import WavelaneError
from runners.first_byte_timeout import drop_first_byte_timeout
from runners.http_metrics import CountRequests
from runners.request_head import limit_request_heads
from runners.server import Server
from runners.service_supervisor import prepare_supervisor

NAME = "wavelane"
# Paths that BentoML answers itself.
_BENTOML_PATHS = ["/generate", "/livez", "/readyz", "/healthz", "/", "/docs.json", "/schema.json"]
_PROBES = ["/health", "/livez", "/readyz", "/healthz", "/metrics"]

try:
    _resolved = load_profile()
    server = Server(_resolved, NAME)
    limit_request_heads(_resolved.profile.http.max_header_bytes, _resolved.profile.http.body_timeout_s)
except (ProfileError, ApiKeysError) as error:
    raise SystemExit(f"profile: {error}") from None
drop_first_byte_timeout()

_cors = _resolved.profile.http.cors

CONFIG = {
    # For BentoCloud's gateway; the layer that would act on it here is dropped. A long answer that is not streamed must
    # not be cut: requests have deadlines of their own (`limits.request_deadline_s`).
    "traffic": {"timeout": 86_400, "concurrency": _resolved.profile.engine.slots},
    "workers": 1,
    # `/metrics` is a route of ours: BentoML's own request metrics keep memory for every path that anyone has tried.
    "metrics": {"enabled": False},
    # A span for every chunk of a stream costs four times what the chunk itself costs.
    "tracing": {"excluded_urls": ["/v1/", "/telemetry", *_PROBES]},
    "http": {
        "cors": {
            "enabled": bool(_cors),
            "access_control_allow_origins": list(_cors),
            "access_control_allow_methods": ["GET", "POST", "DELETE"],
            "access_control_allow_headers": ["Authorization", "Content-Type", "X-Request-Id"],
            "access_control_expose_headers": ["X-Request-Id", "Retry-After", "Warning"],
            "access_control_max_age": 600,
        }
    },
    # Our own log of requests is JSON (`telemetry.request_log`): a path or header of a client cannot forge a line in it,
    # nor make it raise.
    "logging": {"access": {"enabled": False}},
}


@bentoml.service(name=NAME, **CONFIG)
@bentoml.asgi_app(server.app, path="/")
class Wavelane:
    """OpenAI-compatible LLM server."""

    def __init__(self) -> None:
        server.start()

    @bentoml.on_deployment
    @staticmethod
    def prepare() -> None:
        prepare_supervisor(NAME)

    @bentoml.on_shutdown
    async def stop(self) -> None:
        await server.stop()

    @bentoml.api
    async def generate(
        self,
        context: bentoml.Context,
        prompt: Annotated[str, Field(min_length=1)],
        max_tokens: Annotated[int, Field(ge=0)] = 128,
        temperature: Annotated[float, Field(ge=0, le=2)] = 1.0,
        top_p: Annotated[float, Field(gt=0, le=1)] = 1.0,
        seed: int | None = None,
        stop: list[str] | None = None,
    ) -> AsyncGenerator[str, None]:
        """Continue `prompt`; the text comes in pieces."""
        request = CompletionRequest(
            prompt=prompt, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
        )
        try:
            async for text in server.completions.stream(request, context.request.headers.raw):
                yield text
        except WavelaneError as error:
            raise BentoMLException(error.message, error_code=HTTPStatus(error.status)) from error

    async def __is_ready__(self) -> bool:
        return server.is_ready

    async def __is_alive__(self) -> bool:
        return server.is_alive


Wavelane.add_asgi_middleware(
    CountRequests,
    metrics=server.http_metrics,
    bentoml_paths=_BENTOML_PATHS,
    unlogged_paths=_PROBES if _resolved.profile.telemetry.request_log else None,
)
