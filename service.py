"""The BentoML service: `bentoml serve service:Wavelane`. All that it serves is `runners`; see `runners/server.py`."""

from __future__ import annotations

import bentoml

from configs.api_keys import ApiKeysError
from configs.loader import ProfileError, load_profile
from runners.server import Server

NAME = "wavelane"
_PROBES = ["/health", "/livez", "/readyz", "/healthz", "/metrics"]

try:
    _resolved = load_profile()
    server = Server(_resolved, NAME)
except (ProfileError, ApiKeysError) as error:
    raise SystemExit(f"profile: {error}") from None

_cors = _resolved.profile.http.cors

CONFIG = {
    # Counts to the first byte only. A long answer that is not streamed must not be cut: requests have deadlines of
    # their own (`limits.request_deadline_s`).
    "traffic": {"timeout": 86_400, "concurrency": _resolved.profile.engine.slots},
    "workers": 1,
    # A span for every chunk of a stream costs four times what the chunk itself costs.
    "tracing": {"excluded_urls": ["/v1/", *_PROBES]},
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
    "logging": {"access": {"skip_paths": _PROBES}},
}


@bentoml.service(name=NAME, **CONFIG)
@bentoml.asgi_app(server.app, path="/")
class Wavelane:
    """OpenAI-compatible LLM server."""

    def __init__(self) -> None:
        server.start()

    @bentoml.on_shutdown
    async def stop(self) -> None:
        await server.stop()

    async def __is_ready__(self) -> bool:
        return server.is_ready

    async def __is_alive__(self) -> bool:
        return server.is_alive

    async def __metrics__(self, text: str) -> str:
        return text + server.metrics_text()
