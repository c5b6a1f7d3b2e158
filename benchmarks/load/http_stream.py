"""HTTP/1.1 connections that read streams with a time stamp a read, and nothing else while the clock runs.

A read costs a few microseconds: the parser is C, events are told apart and decoded when the request has ended.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

SENT_NOTHING = "the server closed the connection without an answer"


@dataclass(slots=True)
class Exchange:
    """One request and what came back. Times are `time.perf_counter()` seconds."""

    sent_at: float = 0.0
    status: int = 0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    """When each piece of the body arrived."""
    ended_at: float = 0.0
    error: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.reads)


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.served = 0
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.is_open = True

    async def send(self, head: bytes, body: bytes, exchange: Exchange) -> None:
        """Returns when the answer is complete or the connection has gone."""
        assert self._transport is not None, "sent before it was connected"
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        exchange.sent_at = time.perf_counter()
        self._transport.write(head + body)
        await self._done
        self.served += 1

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"no HTTP answer: {error}")
            self.close()

    def on_body(self, piece: bytes) -> None:
        if self._exchange is not None:
            self._exchange.reads.append((self._now, piece))

    def on_message_complete(self) -> None:
        if self._exchange is None or self._parser is None:
            return
        self._exchange.status = self._parser.get_status_code()
        keeps = self._parser.should_keep_alive()
        self._end(None)
        if not keeps:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._exchange is None:
            return
        started = bool(self._exchange.reads)
        self._end(f"the connection broke in the middle: {exc or 'closed'}" if started else SENT_NOTHING)

    def _end(self, error: str | None) -> None:
        if self._exchange is not None and self._done is not None and not self._done.done():
            self._exchange.error = error
            self._exchange.ended_at = self._now if error is None else time.perf_counter()
            self._done.set_result(None)
        self._exchange = None
        self._parser = None

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.close()


class Server:
    """Connections to one server; as many as there are requests at once. `headers` go with every request."""

    def __init__(self, base_url: str, headers: dict[str, str], timeout_s: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is no http:// or https:// URL")
        self.base_url = base_url.rstrip("/")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def open(self, count: int) -> None:
        """Connect ahead of a burst, so that no first token waits for a handshake."""
        missing = count - len(self._idle)
        self._idle += await asyncio.gather(*(self._connect() for _ in range(max(0, missing))))

    async def exchange(self, path: str, body: bytes, method: str = "POST") -> Exchange:
        """Send and read to the end. Faults of the network end up in `error`, never raised.

        A kept connection that the server had closed meanwhile is replaced once.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n".encode()
        exchange = Exchange(sent_at=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    connection = await self._take()
                    was_used = connection.served > 0
                    try:
                        await connection.send(head, body, exchange)
                    except asyncio.CancelledError:
                        connection.close()
                        raise
                    if exchange.error == SENT_NOTHING and was_used:
                        continue
                    break
        except (OSError, TimeoutError) as error:
            exchange.error = (
                f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            )
            exchange.ended_at = time.perf_counter()
            return exchange
        if connection.is_open:
            self._idle.append(connection)
        return exchange

    async def _take(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await self._connect()

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self._tls else None
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._host, self._port, ssl=context
        )
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
