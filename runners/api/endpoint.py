"""Base of every endpoint: a raw ASGI callable that always answers, in the OpenAI error shape when it fails.

Raw ASGI instead of Starlette's request/response functions: no response object per stream, no task group per request,
and an endpoint that raises before its first message would leave the client waiting behind BentoML's timeout layer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from runners.api.access import Access, Caller
from runners.api.errors import Headers, as_wavelane_error, error_body, error_headers
from runners.api.interfaces import Engine
from runners.api.protocol import RequestParser, unknown_fields_warning
from runners.api.settings import ApiSettings
from runners.engine_state import EnginePhase
from runners.errors import (
    EngineUnavailableError,
    HeadersTooLargeError,
    MethodNotAllowedError,
    ModelNotFoundError,
    PayloadTooLargeError,
    RequestBodyTimeoutError,
)
from runners.http_metrics import ROUTE_KEY
from runners.messages import ModelInfo
from runners.text.assets import TextAssets

logger = logging.getLogger(__name__)
request_logger = logging.getLogger("runners.requests")

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


@dataclass(slots=True)
class Exchange:
    """One HTTP request and its answer. `headers` are sent with the answer, whatever it becomes.

    `is_last` says, when the answer begins, whether its connection should carry no other: the server is about to end.
    `caller` is the API key that the request came with, None where none is asked for. `status` is 0 until the answer
    begins. `facts` go into the request log: counts, times and names, never text.
    """

    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    headers: Headers = field(default_factory=list)
    body_timeout_s: float = 60.0
    is_last: Callable[[], bool] = lambda: False
    caller: Caller | None = None
    status: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    async def body(self, max_bytes: int) -> bytes:
        """The request body. PayloadTooLargeError over `max_bytes`, RequestBodyTimeoutError when it does not arrive in
        time, ClientGoneError when the client left."""
        for name, value in self.scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
                raise PayloadTooLargeError(f"The request body is {value.decode()} bytes; the limit is {max_bytes}.")
        try:
            async with asyncio.timeout(self.body_timeout_s):
                return await self._read_body(max_bytes)
        except TimeoutError:
            raise RequestBodyTimeoutError(
                f"The request body did not arrive within {self.body_timeout_s:g} s."
            ) from None

    async def _read_body(self, max_bytes: int) -> bytes:
        message = await self.receive()
        parts: list[bytes] = []
        size = 0
        while True:
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise PayloadTooLargeError(f"The request body is over the limit of {max_bytes} bytes.")
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)
            message = await self.receive()

    @property
    def started(self) -> bool:
        return self.status != 0

    @property
    def key_id(self) -> str:
        """The name of the caller's API key, empty without one."""
        return "" if self.caller is None else self.caller.name

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        own = [(b"x-request-id", self.request_id.encode())]
        if self.is_last():
            own.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers, *own]})

    async def reply(
        self,
        body: bytes,
        *,
        status: int = 200,
        headers: Headers | None = None,
        content_type: bytes = b"application/json",
    ) -> None:
        """A whole answer, JSON unless `content_type` says otherwise."""
        length = (b"content-length", b"%d" % len(body))
        await self.start(status, [(b"content-type", content_type), length, *(headers or [])])
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def until_disconnect(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work`; cancels it as soon as the client is gone, streamed or not, also before the first token."""
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return
            raise ClientGoneError
        finally:
            watcher.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _disconnected(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


class Endpoint(ABC):
    """An ASGI callable for one path. Subclasses implement `handle`; errors they raise become the answer.

    `methods` are the HTTP methods it takes; empty means any. `is_public` ones ask for no API key, `needs_admin` ones
    for an admin's; what is not `is_metered` counts towards no limit of a key.
    """

    methods: ClassVar[tuple[str, ...]] = ("POST",)
    is_public: ClassVar[bool] = False
    needs_admin: ClassVar[bool] = False
    route: str = ""
    """The template of its path, for metrics."""
    is_metered: ClassVar[bool] = True

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def settings(self) -> ApiSettings:
        settings: ApiSettings = self._state.settings
        return settings

    @property
    def engine(self) -> Engine:
        """EngineUnavailableError until the service has put its engine client in place."""
        engine: Engine | None = self._state.engine
        if engine is None:
            raise EngineUnavailableError("The engine has not been started yet.")
        return engine

    def model(self, name: str | None) -> tuple[str, ModelInfo]:
        """The served name and facts of the model a request asks for; the first one when it names none.

        EngineUnavailableError while the engine does not take requests, ModelNotFoundError for an unknown name.
        """
        engine = self.engine
        if not engine.is_ready:
            state = engine.state
            detail = f" ({state.detail})" if state.detail else ""
            raise EngineUnavailableError(f"The engine is not ready: {state.phase}{detail}.")
        for info in engine.models:
            if name is None:
                return info.served_names[0], info
            if name in info.served_names:
                return name, info
        raise ModelNotFoundError(f"The model {name!r} does not exist.", param="model")

    def text_assets(self, info: ModelInfo) -> TextAssets | None:
        """Tokenizer and template of a model, None where it runs on token ids alone."""
        assets: Mapping[str, TextAssets] = self._state.text
        return next((assets[name] for name in info.served_names if name in assets), None)

    async def parse_body(self, exchange: Exchange, parser: RequestParser[BodyT]) -> BodyT:
        """The request's body; the answer's `Warning` header will name the fields that are not known."""
        request, unknown = parser.parse(await exchange.body(self.settings.max_body_bytes))
        if unknown:
            exchange.headers.append((b"warning", unknown_fields_warning(unknown)))
        return request

    @staticmethod
    def require_method(exchange: Exchange, *methods: str) -> None:
        """MethodNotAllowedError, with the `Allow` header, unless the request's method is one of `methods`."""
        method = exchange.scope["method"]
        if method not in methods:
            exchange.headers.append((b"allow", ", ".join(methods).encode()))
            raise MethodNotAllowedError(f"{method} is not allowed here; use {' or '.join(methods)}.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_at = time.monotonic()
        scope[ROUTE_KEY] = self.route
        exchange = Exchange(
            *(scope, receive, send, _request_id(scope)),
            body_timeout_s=self.settings.body_timeout_s,
            is_last=self._is_draining,
        )
        try:
            self._check_header_size(exchange)
            if self._state.tracer is not None:
                self._state.tracer.set_parent(scope["headers"])
            with self._admission(exchange) as exchange.caller:
                if self.methods:
                    self.require_method(exchange, *self.methods)
                await self.handle(exchange)
        except ClientGoneError:
            logger.debug("client gone: %s", exchange.request_id)
            if not exchange.started:
                # Nobody reads it, but a server layer above counts an unanswered request as a crash.
                await exchange.reply(b"", status=499)
        except Exception as raised:  # an unanswered request would hang: what is no known error becomes a 500
            error = as_wavelane_error(raised)
            if exchange.started:
                raise
            exchange.facts["error"] = error.code or error.type
            await exchange.reply(error_body(error), status=error.status, headers=error_headers(error))
        finally:
            if self.settings.request_log and not self.is_public:
                log_request(exchange, time.monotonic() - started_at)

    def _is_draining(self) -> bool:
        engine: Engine | None = self._state.engine
        return engine is not None and engine.state.phase == EnginePhase.DRAINING

    def _check_header_size(self, exchange: Exchange) -> None:
        num_bytes = sum(len(name) + len(value) for name, value in exchange.scope["headers"])
        if num_bytes > self.settings.max_header_bytes:
            raise HeadersTooLargeError(
                f"The request's headers are {num_bytes} bytes; the limit is {self.settings.max_header_bytes}."
            )

    def _admission(self, exchange: Exchange) -> AbstractContextManager[Caller | None]:
        if self.is_public:
            return nullcontext()
        access: Access = self._state.access
        return access.request(exchange.scope["headers"], needs_admin=self.needs_admin, is_metered=self.is_metered)

    @abstractmethod
    async def handle(self, exchange: Exchange) -> None:
        """Answers, or raises."""


def log_request(exchange: Exchange, duration_s: float) -> None:
    """One line of JSON. Paths hold names and session ids, bodies are never part of it."""
    line = {
        "request_id": exchange.request_id,
        "method": exchange.scope["method"],
        "path": exchange.scope["path"],
        "status": exchange.status,
        "duration_s": round(duration_s, 6),
        "key": exchange.key_id,
        **exchange.facts,
    }
    request_logger.info("%s", msgspec.json.encode(line).decode())


def new_id() -> str:
    """24 random hex digits."""
    return os.urandom(12).hex()


def _request_id(scope: Scope) -> str:
    """The client's `X-Request-Id` where it is printable ASCII of at most 128 characters, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode("ascii"))
    return f"req-{new_id()}"
