"""The dashboard: its files at `/` and `/page/…`, and `/telemetry`, the event stream that feeds it.

The files hold no secrets and ask for no API key; the stream does. Nothing on the page comes from elsewhere, and its
Content-Security-Policy forbids it.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from runners.api.endpoint import Endpoint, Exchange
from runners.api.errors import Headers
from runners.api.sse import SSE_HEADERS
from runners.errors import EngineUnavailableError, NotFoundError
from runners.telemetry.feed import Feed, Subscription

_FOLDER = Path(__file__).parent / "page_files"
_INDEX = "index.html"
_CONTENT_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_HEADERS: Headers = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


class Page(Endpoint):
    """A file of the page; 304 where the browser has it already."""

    methods = ("GET", "HEAD")
    is_public = True

    async def handle(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"].get("file", _INDEX)
        file = _files().get(name)
        if file is None:
            raise NotFoundError(f"Unknown path: {exchange.scope['path']}", code="unknown_path")
        body, etag = file
        headers = [*_HEADERS, (b"etag", etag)]
        if (b"if-none-match", etag) in exchange.scope["headers"]:
            await exchange.reply(b"", status=304, headers=headers)
        else:
            await exchange.reply(body, headers=headers, content_type=_CONTENT_TYPES[Path(name).suffix])


@cache
def _files() -> dict[str, tuple[bytes, bytes]]:
    """Body and entity tag of every file, by name; read once."""
    found = {}
    for path in _FOLDER.iterdir():
        if path.suffix in _CONTENT_TYPES:
            body = path.read_bytes()
            found[path.name] = body, b'"' + hashlib.sha256(body).hexdigest()[:16].encode() + b'"'
    return found


class Telemetry(Endpoint):
    """Server-sent events of what the engine does, until the client leaves or lags (`runners.telemetry.feed`)."""

    methods = ("GET",)
    is_metered = False

    async def handle(self, exchange: Exchange) -> None:
        feed: Feed | None = self._state.feed
        if feed is None:
            raise EngineUnavailableError("The engine has not been started yet.")
        subscription = feed.subscribe()
        try:
            await exchange.until_disconnect(_send_all(exchange, subscription))
        finally:
            subscription.close()


async def _send_all(exchange: Exchange, subscription: Subscription) -> None:
    await exchange.start(200, SSE_HEADERS)
    while (events := await subscription.read()) is not None:
        await exchange.send({"type": "http.response.body", "body": events, "more_body": True})
    await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
