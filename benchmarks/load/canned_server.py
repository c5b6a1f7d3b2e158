"""A server that answers at once with prepared events: what the load tool can read, without an engine in the way.

    python -m benchmarks.load.canned_server --port 9100 --step-ms 1

Every `step-ms` each stream gets its next event (0: as fast as the connection takes them), in one write a stream, as an
engine's step does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import cast

import httptools
import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = json.dumps({"object": "list", "data": [{"id": "canned", "object": "model", "owned_by": "nobody"}]}).encode()


def _chunk(data: dict[str, object] | bytes) -> bytes:
    text = data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()
    event = b"data: " + text + b"\n\n"
    return b"%x\r\n" % len(event) + event + b"\r\n"


def _event(**fields: object) -> bytes:
    return _chunk({"id": "cmpl-canned", "object": "text_completion", "created": 1, "model": "canned", **fields})


_TOKEN = _event(choices=[{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}])
_LAST = _event(choices=[{"index": 0, "text": " word", "logprobs": None, "finish_reason": "length"}])


class _Stream(asyncio.Protocol):
    """One connection: reads a request, then gets a tick for every event."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker = ticker
        self._body = b""
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        self._parser = httptools.HttpRequestParser(self)
        if not body:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_MODELS)
            self.transport.write(head + _MODELS)
            return
        self.left = self.total = int(json.loads(body)["max_tokens"])
        self.transport.write(_HEAD)
        self._ticker.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ticker.remove(self)

    def step(self) -> bool:
        """One event; True when it was the last."""
        self.left -= 1
        if self.left > 0:
            self.transport.write(_TOKEN)
            return False
        usage = {"prompt_tokens": 1, "completion_tokens": self.total, "total_tokens": self.total + 1}
        self.transport.write(_LAST + _event(choices=[], usage=usage) + _chunk(b"[DONE]") + b"0\r\n\r\n")
        return True


class Ticker:
    """Steps all streams together every `step_s` seconds while there are any."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: set[_Stream] = set()
        self._runs: asyncio.Task[None] | None = None

    def add(self, stream: _Stream) -> None:
        self._streams.add(stream)
        if self._runs is None or self._runs.done():
            self._runs = asyncio.get_running_loop().create_task(self._run())

    def remove(self, stream: _Stream) -> None:
        self._streams.discard(stream)

    async def _run(self) -> None:
        next_at = time.perf_counter() + self._step_s
        while self._streams:
            await asyncio.sleep(max(0.0, next_at - time.perf_counter()))
            next_at = max(next_at + self._step_s, time.perf_counter())
            for stream in tuple(self._streams):
                if stream.step():
                    self._streams.discard(stream)


async def serve(port: int, step_s: float) -> None:
    """Until cancelled."""
    ticker = Ticker(step_s)
    server = await asyncio.get_running_loop().create_server(lambda: _Stream(ticker), "127.0.0.1", port)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument("--step-ms", type=float, default=1.0)
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.step_ms / 1000))


if __name__ == "__main__":
    main()
