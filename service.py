"""The BentoML service: `bentoml serve service:Wavelane`. All that it serves is `runners`; see `runners/server.py`."""

from __future__ import annotations

import bentoml

from configs.loader import ProfileError, load_profile
from runners.server import Server

NAME = "wavelane"
_PROBES = ["/health", "/livez", "/readyz", "/healthz", "/metrics"]

try:
    _resolved = load_profile()
except ProfileError as error:
    raise SystemExit(f"profile: {error}") from None

server = Server(_resolved, NAME)

CONFIG = {
    # Counts to the first byte only. A long answer that is not streamed must not be cut: requests have deadlines of
    # their own (`limits.request_deadline_s`).
    "traffic": {"timeout": 86_400, "concurrency": _resolved.profile.engine.slots},
    "workers": 1,
    # A span for every chunk of a stream costs four times what the chunk itself costs.
    "tracing": {"excluded_urls": ["/v1/", *_PROBES]},
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
