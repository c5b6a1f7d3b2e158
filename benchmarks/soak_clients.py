"""The clients of a soak: every kind at once, each answer checked.

Chats and completions (streamed and whole), token ids, sessions, clients that leave in the middle, wrong requests and
paths that do not exist, clients that read slowly or not at all, floods over the queue's limit, scrapes of the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

SLOTS = 8
MAX_QUEUED = 24
"""Of the server, so that floods go over it."""
WRONG_REQUESTS: tuple[tuple[str, Any], ...] = (
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [1, 2], "max_tokens": -1}),
    ("/v1/completions", {"prompt": [10**9]}),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}),
    ("/v1/chat/completions", {"messages": "hello"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10**7}),
    ("/v1/completions", {"prompt": "x", "model": "no-such-model"}),
    ("/v1/no/such/path", {}),
)
WORDS = ("the", "sea", "a", "ship", "storm", "light", "harbour", "captain", "wave", "night", "island", "star", "rope")


@dataclass(frozen=True, slots=True)
class Fault:
    """What should not have happened. `request_id` is the `X-Request-Id` that the client sent, `at` Unix time."""

    kind: str
    what: str
    request_id: str
    at: float


class Soak:
    """The clients. `seen` counts (kind of client, how it ended)."""

    def __init__(self, port: int, model: str, seconds: float) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self.faults: list[Fault] = []
        self._port = port
        self._model = model
        self._random = random.Random(7)
        self._ends = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self._numbers = itertools.count()
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=120,
            limits=limits,
            event_hooks={"request": [self._name_request]},
        )

    async def run(self) -> None:
        kinds: dict[Callable[[], Awaitable[None]], int] = {
            self._chat: 2,
            self._ids: 2,
            self._session: 1,
            self._leave: 2,
            self._wrong: 1,
            self._slow_reader: 1,
            self._no_reader: 1,
            self._flood: 1,
            self._scrape: 1,
        }
        async with self._http:
            await asyncio.gather(*(self._repeat(kind) for kind, number in kinds.items() for _ in range(number)))

    async def _repeat(self, kind: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < self._ends:
            try:
                await kind()
            except httpx.RequestError as error:
                self._fault(kind.__name__, f"the connection broke: {error!r}", error.request.headers["x-request-id"])

    async def _name_request(self, request: httpx.Request) -> None:
        request.headers["x-request-id"] = self._new_id()

    def _new_id(self) -> str:
        return f"soak-{next(self._numbers)}"

    def _fault(self, kind: str, what: str, request_id: str) -> None:
        self.seen[kind, "fault"] += 1
        self.faults.append(Fault(kind, what, request_id, time.time()))

    def _check(self, kind: str, response: httpx.Response, *expected: int) -> bool:
        """Whether the answer is a good one; what was not expected is a fault."""
        self.seen[kind, str(response.status_code)] += 1
        request_id = response.request.headers["x-request-id"]
        if response.status_code not in expected:
            self._fault(kind, f"status {response.status_code}: {response.text[:200]}", request_id)
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        if is_stream and (not response.text.endswith("data: [DONE]\n\n") or '"error"' in response.text):
            self._fault(kind, f"a stream ended badly: {response.text[-200:]!r}", request_id)
        return response.status_code == 200

    def _text(self, num_words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=num_words))

    def _sampling(self) -> dict[str, Any]:
        if self._random.random() < 0.5:
            return {"temperature": 0}
        return {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.2}

    async def _chat(self) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": self._text(self._random.randint(3, 60))}],
            "max_tokens": self._random.randint(1, 40),
            "stream": self._random.random() < 0.5,
            **self._sampling(),
        }
        self._check("chat", await self._http.post("/v1/chat/completions", json=body), 200, 429)

    async def _ids(self) -> None:
        body = {
            "model": self._model,
            "prompt": [self._random.randint(5, 40_000) for _ in range(self._random.choice((3, 23, 128, 500)))],
            "max_tokens": self._random.randint(1, 60),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self._random.random() < 0.5,
            "logprobs": self._random.choice((None, 3)),
            **self._sampling(),
        }
        self._check("ids", await self._http.post("/v1/completions", json=body), 200, 429)

    async def _session(self) -> None:
        session = f"soak-{self._random.randrange(10**9)}"
        for _ in range(4):
            body = {
                "model": self._model,
                "prompt": self._text(8),
                "session_id": session,
                "max_tokens": 12,
                **self._sampling(),
            }
            self._check("session", await self._http.post("/v1/completions", json=body), 200, 429)
        self._check("session", await self._http.delete(f"/v1/sessions/{session}"), 200, 404)

    async def _leave(self) -> None:
        """Close the connection before the first token, or after a few."""
        body = {"model": self._model, "prompt": self._text(40), "max_tokens": 400, "ignore_eos": True, "stream": True}
        reader, writer, _ = await self._send(body)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(self._random.uniform(0.0, 2.0)):
                while await reader.read(4096):
                    pass
        writer.close()
        self.seen["leaves", "left"] += 1
        await asyncio.sleep(0.2)

    async def _wrong(self) -> None:
        path, body = self._random.choice(WRONG_REQUESTS)
        self._check("wrong", await self._http.post(path, json=body), 400, 404)
        self._check("wrong", await self._http.post(path, content=b'{"prompt": '), 400, 404)
        stranger = f"/{self._random.randrange(10**9)}"
        self._check("wrong", await self._http.get(self._random.choice(("/v1", "", "/v1/models")) + stranger), 404)
        await asyncio.sleep(0.1)

    async def _slow_reader(self) -> None:
        """A few bytes at a time; every one of them arrives."""
        body = {"model": self._model, "prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True, "stream": True}
        reader, writer, request_id = await self._send(body)
        received = b""
        with contextlib.suppress(OSError):
            while part := await reader.read(256):
                received += part
                await asyncio.sleep(0.05)
        writer.close()
        status = received.split(b" ", 2)[1].decode() if received else "nothing"
        self.seen["slow reader", status] += 1
        if status not in ("200", "429") or (status == "200" and b"data: [DONE]" not in received):
            self._fault("slow reader", f"{status}, {len(received)} bytes: {received[-200:]!r}", request_id)

    async def _no_reader(self) -> None:
        """Never reads; the server drops it after `http.send_timeout_s`, or has sent everything into its buffers."""
        body = {
            "model": self._model,
            "prompt": [5, 6, 7],
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 20,
        }
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(connection, ("127.0.0.1", self._port))
            await loop.sock_sendall(connection, self._head(body, self._new_id()))
            await asyncio.sleep(10)
        finally:
            connection.close()
        self.seen["no reader", "waited"] += 1

    async def _flood(self) -> None:
        """More at once than there are places and queue; what is refused says when to come back."""
        body = {"model": self._model, "prompt": [9, 8, 7], "max_tokens": 4, "ignore_eos": True}
        number = SLOTS + 2 * MAX_QUEUED
        answers = await asyncio.gather(*(self._http.post("/v1/completions", json=body) for _ in range(number)))
        for answer in answers:
            self._check("flood", answer, 200, 429)
            if answer.status_code == 429 and int(answer.headers.get("retry-after", "0")) < 1:
                self._fault("flood", "a 429 without Retry-After", answer.request.headers["x-request-id"])
        await asyncio.sleep(10)

    async def _scrape(self) -> None:
        self._check("scrape", await self._http.get("/metrics"), 200)
        await asyncio.sleep(2)

    @staticmethod
    def _head(body: dict[str, Any], request_id: str) -> bytes:
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: {request_id}\r\n"
        )
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content

    async def _send(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=4096)
        request_id = self._new_id()
        writer.write(self._head(body, request_id))
        return reader, writer, request_id
