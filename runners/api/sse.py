"""Server-sent events: prebuilt byte templates, and the loops that write them.

The hot path of the HTTP process. An event is four joined byte strings around the JSON-escaped text; no model, dict or
response object is made per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from runners.api.endpoint import Exchange
from runners.api.errors import Headers, as_wavelane_error, error_body
from runners.api.generation import Choice, Delta

DONE = b"data: [DONE]\n\n"
SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encode = msgspec.json.Encoder().encode


class EventWriter(Protocol):
    """Turns what a choice generates into events."""

    def event(self, delta: Delta, finish_reason: str | None) -> bytes: ...


class EventTemplate:
    """Writes the events of one choice.

    `first_head` and `head` end where the JSON text begins, the first one holding what only the first event tells;
    `text_end` closes what `head` opened around the text (chat's delta object). `logprobs` makes the value of that
    field, None where none was asked for. `with_usage` puts `usage: null` on every event, `with_token_ids` the ids.
    """

    __slots__ = (
        "_head",
        "_is_plain",
        "_logprobs",
        "_next_head",
        "_tail",
        "_tail_end",
        "_text_end",
        "_with_token_ids",
    )

    def __init__(
        self,
        first_head: bytes,
        head: bytes,
        *,
        text_end: bytes = b"",
        logprobs: Callable[[Delta], Any] | None = None,
        with_token_ids: bool = False,
        with_usage: bool = False,
    ) -> None:
        self._head = first_head
        self._next_head = head
        self._text_end = text_end
        self._logprobs = logprobs
        self._with_token_ids = with_token_ids
        self._is_plain = logprobs is None and not with_token_ids
        self._tail_end = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"
        self._tail = text_end + b',"logprobs":null,"finish_reason":null' + self._tail_end

    def event(self, delta: Delta, finish_reason: str | None) -> bytes:
        head = self._head
        self._head = self._next_head
        if finish_reason is None and self._is_plain:
            return head + _encode(delta.text) + self._tail
        parts = [head, _encode(delta.text), self._text_end]
        if self._with_token_ids:
            parts += (b',"token_ids":', _encode(delta.token_ids))
        parts += (
            b',"logprobs":',
            b"null" if self._logprobs is None else _encode(self._logprobs(delta)),
            b',"finish_reason":',
            _encode(finish_reason),
            self._tail_end,
        )
        return b"".join(parts)


def data_event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


async def stream_choices(
    exchange: Exchange, choices: Sequence[Choice], templates: Sequence[EventWriter], closing: Callable[[], bytes]
) -> None:
    """Sends every event of every choice, then `closing()` and `[DONE]`; an error becomes an event of its own.

    A slow client makes `send` wait; then the engine's tokens merge in the request stream, and one event carries them.
    """
    await exchange.start(200, SSE_HEADERS)
    try:
        if len(choices) == 1:
            await _stream_one(exchange, choices[0], templates[0], closing)
        else:
            await _stream_many(exchange, choices, templates, closing)
    except Exception as raised:  # the answer has begun: whatever it is, the client can only be told in the stream
        error = as_wavelane_error(raised)
        exchange.facts["error"] = error.code or error.type
        last = b"data: " + error_body(error) + b"\n\n" + DONE
        await exchange.send({"type": "http.response.body", "body": last, "more_body": False})


async def _stream_one(exchange: Exchange, choice: Choice, template: EventWriter, closing: Callable[[], bytes]) -> None:
    send = exchange.send
    async for delta in choice.deltas():
        reason = choice.finish_reason
        body = template.event(delta, reason)
        if reason is None:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        else:
            # Last token, usage and [DONE] leave in one write.
            await send({"type": "http.response.body", "body": body + closing() + DONE, "more_body": False})


async def _stream_many(
    exchange: Exchange, choices: Sequence[Choice], templates: Sequence[EventWriter], closing: Callable[[], bytes]
) -> None:
    """One task a choice, one writer; the bounded queue passes the client's slowness on to every choice."""
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(maxsize=2 * len(choices))

    async def feed(choice: Choice, template: EventWriter) -> None:
        try:
            async for delta in choice.deltas():
                await queue.put(template.event(delta, choice.finish_reason))
            await queue.put(None)
        except Exception as error:  # raised again by the writer below
            await queue.put(error)

    tasks = [asyncio.ensure_future(feed(*pair)) for pair in zip(choices, templates, strict=True)]
    try:
        num_open = len(tasks)
        while num_open:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            num_open -= items.count(None)
            body = b"".join(item for item in items if isinstance(item, bytes))
            errors = [item for item in items if isinstance(item, Exception)]
            if not num_open:
                await exchange.send({"type": "http.response.body", "body": body + closing() + DONE, "more_body": False})
            elif body:
                await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
            if errors:
                raise errors[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
