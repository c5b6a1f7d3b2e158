"""`/metrics`: everything the server counts, in Prometheus's text format."""

from __future__ import annotations

from runners.api.endpoint import Endpoint, Exchange


class Metrics(Endpoint):
    """Open to everyone, as probes are: names and numbers, no text of a request."""

    methods = ("GET", "HEAD")
    is_public = True

    async def handle(self, exchange: Exchange) -> None:
        text: str = self._state.metrics_text()
        await exchange.reply(text.encode(), content_type=b"text/plain; version=0.0.4; charset=utf-8")
