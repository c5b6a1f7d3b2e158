"""Request streams with a twist: choices that share a prefill, a stream whose first chunk is awaited early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from runners.api.interfaces import OutputChunk, RequestStream


class LeadingStream:
    """The first choice of a prompt. `started` is set with its first chunk: its prefill is then in the prefix cache."""

    def __init__(self, stream: RequestStream, started: asyncio.Event) -> None:
        self._stream = stream
        self._started = started

    async def __aiter__(self) -> AsyncIterator[OutputChunk]:
        try:
            async for chunk in self._stream:
                self._started.set()
                yield chunk
        finally:
            self._started.set()

    def abort(self) -> None:
        self._stream.abort()

    def finish(self, keep_tokens: int) -> None:
        self._stream.finish(keep_tokens)


class FollowingStream:
    """Another choice of the prompt, submitted once the first one has `started`."""

    def __init__(self, submit: Callable[[], Awaitable[RequestStream]], started: asyncio.Event) -> None:
        self._submit = submit
        self._started = started
        self._stream: RequestStream | None = None
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[OutputChunk]:
        await self._started.wait()
        if self._is_closed:
            return
        self._stream = await self._submit()
        async for chunk in self._stream:
            yield chunk

    def abort(self) -> None:
        self._is_closed = True
        if self._stream is not None:
            self._stream.abort()

    def finish(self, keep_tokens: int) -> None:
        if self._stream is not None:
            self._stream.finish(keep_tokens)


class AwaitedStream:
    """A stream whose first chunk can be awaited before the answer begins, so that a refusal still has its status."""

    def __init__(self, stream: RequestStream) -> None:
        self._stream = stream
        self._chunks = aiter(stream)
        self._first: OutputChunk | None = None

    async def wait_for_first(self) -> None:
        """Raises what the engine raises instead of a first chunk."""
        self._first = await anext(self._chunks, None)

    async def __aiter__(self) -> AsyncIterator[OutputChunk]:
        if self._first is not None:
            first, self._first = self._first, None
            yield first
        async for chunk in self._chunks:
            yield chunk

    def abort(self) -> None:
        self._stream.abort()

    def finish(self, keep_tokens: int) -> None:
        self._stream.finish(keep_tokens)
