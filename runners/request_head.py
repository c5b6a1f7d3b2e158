"""A bound on request heads (request line and headers), before they are whole: in bytes and in time.

uvicorn's fast HTTP parser collects headers without a limit and without a deadline: a client that never ends them would
hold as much memory as it cares to send (measured: all of 200 MB), or a connection for ever.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any

_BODY = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":"%s"}}'
_HEAD = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"


def limit_request_heads(max_bytes: int, timeout_s: float) -> bool:
    """Let every server that uvicorn starts from now on in this process keep to these limits.

    `max_bytes` is checked as data arrives: what one read brings may exceed it. False where uvicorn has its other
    parser (h11), which has a limit of its own.
    """
    auto: Any = import_module("uvicorn.protocols.http.auto")
    base = auto.AutoHTTPProtocol
    if base.__name__ != "HttpToolsProtocol":
        return False
    auto.AutoHTTPProtocol = _limited(base, max_bytes, timeout_s)
    # The name is looked up when a server is configured; one that has been configured keeps its class.
    return True


def _limited(base: Any, max_bytes: int, timeout_s: float) -> Any:
    class LimitedHttpProtocol(base):  # type: ignore[misc]
        """Counts what arrives between the begin of a request and the end of its head, and in trailers."""

        _head_bytes: int | None = 0
        _head_timer: asyncio.TimerHandle | None = None
        # Behind a chunk's header: what came and is no content so far.
        _unclaimed_bytes: int | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._begin_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._head_bytes is not None:
                self._head_bytes += len(data)
                if self._head_bytes > max_bytes and not self._ends_in(data):
                    status = b"431 Request Header Fields Too Large"
                    self._refuse(status, b"The request's headers are too large.", b"headers_too_large")
                    return
            if self._unclaimed_bytes is not None:
                self._unclaimed_bytes += len(data)
            super().data_received(data)
            # Only now is it known whether these were a chunk's content or one endless trailer.
            if self._unclaimed_bytes is not None and self._unclaimed_bytes > max_bytes and self.transport is not None:
                self._unclaimed_bytes = None
                self.transport.close()

        def on_chunk_header(self) -> None:
            self._unclaimed_bytes = 0

        def on_chunk_complete(self) -> None:
            self._unclaimed_bytes = None

        def on_body(self, body: bytes) -> None:
            self._unclaimed_bytes = None
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._unclaimed_bytes = None
            super().on_message_complete()

        def on_message_begin(self) -> None:
            self._begin_head()
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            # Behind a chunked body there may be headers again, without a limit: nobody reads those, so none is kept.
            if self._head_bytes is not None:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._end_head()
            super().on_headers_complete()

        @staticmethod
        def _ends_in(data: bytes) -> bool:
            """A head that ends in this very read, such as a small one with a large body behind it."""
            return b"\r\n\r\n" in data

        def _begin_head(self) -> None:
            self._end_head()
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(timeout_s, self._expire)

        def _end_head(self) -> None:
            self._head_bytes = None
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _expire(self) -> None:
            self._refuse(b"408 Request Timeout", b"The request's headers did not arrive in time.", b"request_timeout")

        def _refuse(self, status: bytes, message: bytes, code: bytes) -> None:
            self._end_head()
            if self.transport is not None and not self.transport.is_closing():
                body = _BODY % (message, code)
                self.transport.write(_HEAD % (status, len(body)) + body)
                self.transport.close()

    return LimitedHttpProtocol
