"""`RequestStream`: the output of one request as an async iterator, merged while its reader lags."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from runners.errors import (
    ConflictError,
    ContextLengthError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    RateLimitError,
    RequestFailedError,
    RequestTimeoutError,
    WavelaneError,
)
from runners.messages import AbortRequests, EngineInput, FinishRequest, OutputError, TokenLogprobs
from runners.request import FinishReason
from runners.request_metrics import ABORTED, RequestTimes


class OutputChunk:
    """New tokens of one request: those of one step, or of several when the reader has lagged."""

    __slots__ = ("cached_tokens", "embedding", "finish_reason", "logprobs", "prompt_logprobs", "token_ids")

    def __init__(
        self,
        token_ids: list[int],
        finish_reason: FinishReason | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
        cached_tokens: int = 0,
        embedding: bytes = b"",
    ) -> None:
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.cached_tokens = cached_tokens
        self.embedding = embedding

    def absorb(self, later: OutputChunk) -> None:
        """Append a later chunk of the same request."""
        self.token_ids += later.token_ids
        self.finish_reason = later.finish_reason
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.cached_tokens = max(self.cached_tokens, later.cached_tokens)
        self.embedding = later.embedding or self.embedding


_ERRORS_BY_CODE: dict[str, type[WavelaneError]] = {
    kind.default_code: kind
    for kind in (
        ContextLengthError,
        EngineUnavailableError,
        ModelNotFoundError,
        RateLimitError,
        RequestFailedError,
        RequestTimeoutError,
    )
    if kind.default_code is not None
} | {
    "session_busy": ConflictError,
    "session_salt_mismatch": ConflictError,
    "session_not_found": NotFoundError,
    "invalid_request": InvalidRequestError,
    "model_exists": ConflictError,
    "model_not_loaded": InvalidRequestError,
}


def error_of(error: OutputError) -> WavelaneError:
    """The exception for an engine's error; a code that names no known kind stays as the code of a 500."""
    kind = _ERRORS_BY_CODE.get(error.code, RequestFailedError)
    return kind(error.message, code=error.code)


class StreamOwner(Protocol):
    """What a stream needs of `OpenStreams`."""

    def close_stream(self, stream: RequestStream, reason: str) -> bool: ...
    def send(self, message: EngineInput) -> None: ...


class RequestStream:
    """The output of one request: `async for chunk in stream`. One reader.

    What the reader has not taken yet is one merged chunk. Iterating ends after the chunk with a finish reason, after
    `abort` or `finish`, or raises a `runners.errors` exception (after the tokens that came before it).
    """

    __slots__ = (
        "_buffered",
        "_error",
        "_is_closed",
        "_owner",
        "_waiter",
        "has_started",
        "request_id",
        "times",
    )

    def __init__(self, owner: StreamOwner, request_id: str, times: RequestTimes) -> None:
        self.request_id = request_id
        self.times = times
        self.has_started = False
        self._owner = owner
        self._buffered: OutputChunk | None = None
        self._error: WavelaneError | None = None
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[OutputChunk]:
        return self

    async def __anext__(self) -> OutputChunk:
        while True:
            chunk = self._buffered
            if chunk is not None:
                self._buffered = None
                return chunk
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def abort(self) -> None:
        """The client is gone: the engine frees everything. Idempotent; nothing after the end."""
        if self._owner.close_stream(self, ABORTED):
            self._owner.send(AbortRequests([self.request_id]))
        self._end_quietly()

    def finish(self, keep_tokens: int) -> None:
        """A stop string ended the request after `keep_tokens` generated tokens. Idempotent; nothing after the end."""
        if self._owner.close_stream(self, FinishReason.STOP):
            self._owner.send(FinishRequest(self.request_id, keep_tokens))
        self._end_quietly()

    def _end_quietly(self) -> None:
        self._is_closed = True
        self._buffered = None
        self._error = None
        self._wake()

    # --- for the client -------------------------------------------------------------------------------------------

    def push(self, chunk: OutputChunk) -> int:
        """Add tokens; returns how many now wait for the reader."""
        if chunk.finish_reason is not None:
            self._is_closed = True
        if self._buffered is None:
            self._buffered = chunk
        else:
            self._buffered.absorb(chunk)
        self._wake()
        return len(self._buffered.token_ids)

    def fail(self, error: WavelaneError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
