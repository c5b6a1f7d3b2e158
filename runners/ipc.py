"""Transport between HTTP processes and the engine process: msgpack over ZeroMQ ipc, one message a step.

The engine binds a ROUTER, each HTTP process (a front end) connects a DEALER. Sockets lie in a private folder. Flow
control is ours, not ZeroMQ's: a high-water mark would drop messages, an `OutputWindow` merges them.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from runners.messages import (
    EngineInput,
    EngineOutput,
    OutputError,
    RequestOutput,
    StepOutputs,
    TokenLogprobs,
)
from runners.request import FinishReason

logger = logging.getLogger(__name__)

WINDOW_MESSAGES = 16
"""`StepOutputs` a front end may have unacknowledged; beyond it outputs are merged until it catches up."""
ACKNOWLEDGE_EVERY = 4
"""A front end acknowledges every so many messages: a quarter of the window, so that an idle one never fills it."""
MAX_BUFFERED_TOKENS = 16_384
"""Tokens of one request that may wait for a reader, on either side; past it the request is aborted."""

SOCKET_NAME = "engine.sock"
_MAX_SOCKET_PATH_BYTES = 100  # sun_path holds 108 with its terminator on Linux, 104 on macOS
_RECONNECT_MS = 10

_encoder = msgspec.msgpack.Encoder()
_input_decoder: msgspec.msgpack.Decoder[EngineInput] = msgspec.msgpack.Decoder(EngineInput)
_output_decoder: msgspec.msgpack.Decoder[EngineOutput] = msgspec.msgpack.Decoder(EngineOutput)

encode: Callable[[Any], bytes] = _encoder.encode


def decode_input(data: bytes) -> EngineInput:
    """A message for the engine. Raises msgspec.DecodeError (or its ValidationError) on anything else."""
    return _input_decoder.decode(data)


def decode_output(data: bytes) -> EngineOutput:
    """A message from the engine. Raises msgspec.DecodeError (or its ValidationError) on anything else."""
    return _output_decoder.decode(data)


def reader_too_slow(limit_tokens: int) -> OutputError:
    """The end of a request whose reader let more than `limit_tokens` pile up."""
    message = f"the reader fell more than {limit_tokens} tokens behind, the request was aborted"
    return OutputError(message, "reader_too_slow")


def make_socket_folder() -> Path:
    """A new folder that only this user may enter (0700), short enough for a Unix socket's path."""
    folder = tempfile.mkdtemp(prefix="wavelane-")
    if len(folder.encode()) > _MAX_SOCKET_PATH_BYTES - len("/" + SOCKET_NAME):
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="wavelane-", dir="/tmp")
    return Path(folder)


class _PendingOutput:
    """Outputs of one request that wait for room in the window, merged: every id and logprob is kept."""

    __slots__ = (
        "cached_tokens",
        "embedding",
        "error",
        "finish_reason",
        "logprobs",
        "prompt_logprobs",
        "queue_s",
        "token_ids",
    )

    def __init__(self) -> None:
        self.token_ids = bytearray()
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.error: OutputError | None = None
        self.cached_tokens = 0
        self.embedding = b""
        self.queue_s: float | None = None

    def merge(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason = output.finish_reason or self.finish_reason
        self.error = output.error or self.error
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.embedding = output.embedding or self.embedding
        if output.queue_s is not None:
            self.queue_s = output.queue_s

    def build(self, request_id: str) -> RequestOutput:
        return RequestOutput(
            request_id=request_id,
            token_ids=bytes(self.token_ids),
            finish_reason=self.finish_reason,
            error=self.error,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
            embedding=self.embedding,
            queue_s=self.queue_s,
        )


class OutputWindow:
    """Flow control towards one front end, without I/O.

    At most `window_messages` `StepOutputs` are unacknowledged. While the window is full, outputs are merged by
    request; a request with more than `max_buffered_tokens` waiting is given up.
    """

    def __init__(self, window_messages: int = WINDOW_MESSAGES, max_buffered_tokens: int = MAX_BUFFERED_TOKENS) -> None:
        self._window_messages = window_messages
        self._max_buffered_bytes = 4 * max_buffered_tokens
        self._sent = 0
        self._acknowledged = 0
        self._pending: dict[str, _PendingOutput] = {}

    @property
    def is_open(self) -> bool:
        return self._sent - self._acknowledged < self._window_messages

    def acknowledge(self, sequence: int) -> None:
        """The front end has handled everything up to `sequence`; a number never sent is ignored."""
        if self._acknowledged < sequence <= self._sent:
            self._acknowledged = sequence

    def offer(self, outputs: list[RequestOutput]) -> list[str]:
        """Queue outputs behind what waits already. Returns the requests whose reader is too slow: abort them."""
        given_up: list[str] = []
        for output in outputs:
            pending = self._pending.get(output.request_id)
            if pending is None:
                pending = self._pending[output.request_id] = _PendingOutput()
            if pending.error is not None:
                continue
            pending.merge(output)
            if len(pending.token_ids) > self._max_buffered_bytes:
                pending = self._pending[output.request_id] = _PendingOutput()
                pending.error = reader_too_slow(self._max_buffered_bytes // 4)
                given_up.append(output.request_id)
        return given_up

    def discard(self, request_id: str) -> None:
        """Nobody waits for this request's outputs any more."""
        self._pending.pop(request_id, None)

    def take(self) -> StepOutputs | None:
        """The next message, when there is something to say and the window has room."""
        if not self._pending or not self.is_open:
            return None
        outputs = [pending.build(request_id) for request_id, pending in self._pending.items()]
        self._pending.clear()
        return self._number(outputs)

    def send_now(self, outputs: list[RequestOutput]) -> StepOutputs | None:
        """The usual case without a copy: room in the window and nothing waiting. None: `offer` them."""
        if self._pending or not self.is_open:
            return None
        return self._number(outputs)

    def take_back(self, message: StepOutputs) -> None:
        """The socket had no room for the message just taken: it waits again, before anything newer."""
        newer, self._pending = self._pending, {}
        self._sent -= 1
        self.offer(message.outputs)
        for request_id, pending in newer.items():
            self.offer([pending.build(request_id)])

    def _number(self, outputs: list[RequestOutput]) -> StepOutputs:
        self._sent += 1
        return StepOutputs(sequence=self._sent, outputs=outputs)


class FrontEndSocket:
    """An HTTP process's end, on the running asyncio loop. `on_message` gets one message a loop iteration.

    One at a time on purpose: the streams that a step's tokens woke run before the next step's tokens arrive, so a
    burst of messages becomes several events instead of one merged one. A message that cannot be decoded is logged,
    counted in `corrupt_messages` and skipped.
    """

    def __init__(self, endpoint: str, on_message: Callable[[EngineOutput], None]) -> None:
        self.corrupt_messages = 0
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # Unlimited, because a limit drops or blocks: a stuck engine is killed within seconds, and its queue with it.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.connect(endpoint)
        self._fd = int(self._socket.get(zmq.FD))
        self._is_scheduled = False
        self._is_closed = False
        self._loop.add_reader(self._fd, self._on_readable)
        self._look_again()

    def send(self, message: EngineInput) -> None:
        """Queue a message; never blocks. Does nothing once closed."""
        if self._is_closed:
            return
        self._socket.send(encode(message), zmq.NOBLOCK)
        self._look_again()

    def close(self, linger_ms: int = 0) -> None:
        """Close; messages still queued get `linger_ms` to leave."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            self._context.destroy(linger=linger_ms)

    def _look_again(self) -> None:
        # ZeroMQ's descriptor is edge-triggered: any call on the socket may have consumed the edge of a message.
        if not self._is_scheduled and int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._is_scheduled = True
            self._loop.call_soon(self._on_scheduled)

    def _on_scheduled(self) -> None:
        self._is_scheduled = False
        self._on_readable()

    def _on_readable(self) -> None:
        if self._is_closed or self._is_scheduled:
            return
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        try:
            self._handle(data)
        finally:
            if not self._is_closed:
                self._look_again()

    def _handle(self, data: bytes) -> None:
        try:
            message = decode_output(data)
        except msgspec.DecodeError as error:
            self.corrupt_messages += 1
            logger.error("dropped a corrupt message of %d bytes from the engine: %s", len(data), error)
        else:
            self._on_message(message)
