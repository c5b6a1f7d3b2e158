"""The requests in flight as the HTTP process knows them: their streams, their places in the queues, their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from runners.errors import WavelaneError
from runners.ipc import reader_too_slow
from runners.messages import AbortRequests, EngineInput, OutputError, RequestOutput, unpack_ids
from runners.queue_limits import QueueLimits
from runners.request_metrics import RequestMetrics
from runners.request_stream import OutputChunk, RequestStream, error_of


class OpenStreams:
    """Streams by request id. A stream leaves with its last output, its reader, or an error.

    `new_queue` makes the limits of one model; `send` brings a message to the engine.
    """

    def __init__(
        self,
        metrics: RequestMetrics,
        new_queue: Callable[[], QueueLimits],
        send: Callable[[EngineInput], None],
        max_buffered_tokens: int,
    ) -> None:
        self.send = send
        self._metrics = metrics
        self._new_queue = new_queue
        self._max_buffered_tokens = max_buffered_tokens
        self._queues: dict[str, QueueLimits] = {}  # by a model's first name
        self._streams: dict[str, RequestStream] = {}
        self._became_idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place."""
        return sum(queue.num_queued for queue in self._queues.values())

    def queue_of(self, model: str) -> QueueLimits:
        """The queue of the model of this first name."""
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = self._new_queue()
        return queue

    def forget_queue(self, model: str) -> None:
        """The model has been unloaded."""
        self._queues.pop(model, None)

    def open(self, request_id: str, model: str, num_prompt_tokens: int, now: float) -> RequestStream:
        """The stream of a new request for the model of this first name."""
        times = self._metrics.begin(request_id, model, num_prompt_tokens, now)
        stream = self._streams[request_id] = RequestStream(self, request_id, times)
        self.queue_of(model).enter(num_prompt_tokens)
        return stream

    def close_stream(self, stream: RequestStream, reason: str) -> bool:
        """Forget a stream, which ended for `reason`; empty for an error. False when it had ended already."""
        if self._streams.get(stream.request_id) is not stream:
            return False
        if reason:
            self._metrics.finish(stream.times, reason, time.monotonic())
        del self._streams[stream.request_id]
        self.queue_of(stream.times.model).leave(stream.times.num_prompt_tokens, has_started=stream.has_started)
        if not self._streams:
            self._became_idle.set()
        return True

    def deliver(self, output: RequestOutput, now: float) -> None:
        """Give an output to its reader; one whose stream has ended here meanwhile is dropped."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if not stream.has_started:
            stream.has_started = True
            self.queue_of(stream.times.model).start(stream.times.num_prompt_tokens)
            if output.queue_s is not None:
                self._metrics.queued(stream.times, output.queue_s)
        try:
            token_ids = unpack_ids(output.token_ids)
        except ValueError:
            self._abort(stream, OutputError("the engine sent malformed token ids", "request_failed"))
            return
        if token_ids:
            self._metrics.tokens(stream.times, len(token_ids), now)
        if output.finish_reason is not None:
            self.close_stream(stream, output.finish_reason)
        if token_ids or output.finish_reason is not None or output.prompt_logprobs is not None:
            num_buffered = stream.push(
                OutputChunk(
                    token_ids,
                    output.finish_reason,
                    output.logprobs,
                    output.prompt_logprobs,
                    output.cached_tokens,
                    output.embedding,
                )
            )
            if num_buffered > self._max_buffered_tokens and output.finish_reason is None:
                self._abort(stream, reader_too_slow(self._max_buffered_tokens))
        if output.error is not None:
            self.close_stream(stream, "")
            self._fail(stream, error_of(output.error))

    def _abort(self, stream: RequestStream, error: OutputError) -> None:
        if self.close_stream(stream, ""):
            self.send(AbortRequests([stream.request_id]))
        self._fail(stream, error_of(error))

    def _fail(self, stream: RequestStream, error: WavelaneError) -> None:
        self._metrics.fail(stream.times, error)
        stream.fail(error)

    def abort_all(self, error: WavelaneError) -> None:
        """Every open stream raises `error`, and the engine is told to drop its request."""
        if self._streams:
            self.send(AbortRequests(list(self._streams)))
        self.fail_all(error)

    def fail_all(self, error: WavelaneError) -> None:
        """Every open stream raises `error`, now."""
        streams, self._streams = list(self._streams.values()), {}
        for queue in self._queues.values():
            queue.clear()
        for stream in streams:
            self._fail(stream, error)
        self._became_idle.set()

    async def wait_until_idle(self, deadline_s: float) -> bool:
        """Wait until no stream is open, at most `deadline_s`. True when none is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._streams:
                    self._became_idle.clear()
                    await self._became_idle.wait()
        return not self._streams
