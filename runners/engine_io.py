"""The engine's I/O thread: receives requests, sends outputs, beats. It never decides and never touches the device.

Between it and the loop thread lie two queues: `inbox` (decoded messages, in) and `publish` (outputs, out).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from runners.ipc import OutputWindow, decode_input, encode
from runners.messages import (
    AbortRequests,
    Acknowledge,
    AddRequest,
    AdminReply,
    Beat,
    EngineInput,
    EngineStats,
    FinishRequest,
    Hello,
    LoadModel,
    LoopTimes,
    OutputError,
    Progress,
    Ready,
    RequestOutput,
    SessionsQuery,
    SessionsReply,
    SetQuota,
    Shutdown,
    StartupFailed,
    StepOutputs,
    UnloadModel,
    WatchSteps,
)
from runners.telemetry.step_observer import StepBatch

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 1.0
# Beats may be lost to a front end that has stopped reading (only the newest counts); outputs are never sent blindly:
# their window is far smaller than this.
_SEND_HIGH_WATER_MARK = 256
_LINGER_MS = 1000

Announcement = Progress | Ready | StartupFailed
Reply = SessionsReply | AdminReply
Outgoing = list[RequestOutput] | Reply | StepBatch | Announcement | OutputError


@dataclass(slots=True)
class LoopVitals:
    """What the loop thread tells the beats; plain attribute writes, one writer."""

    loop_stamp: float = field(default_factory=time.monotonic)
    step_limit_s: float | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    times: LoopTimes = field(default_factory=LoopTimes)
    model_stats: dict[str, EngineStats] = field(default_factory=dict)


class _FrontEnd:
    """One connected HTTP process."""

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.window = OutputWindow()
        self.watches_steps = False


class EngineIO:
    """Owns the ROUTER socket of an engine process.

    Thread-safe for the loop thread: `inbox`, `publish`, `announce`, `fail_all`,
    `wait_for_front_end`, `vitals`, `stop`. Everything else
    belongs to the I/O thread.
    """

    def __init__(self, socket_path: Path, beat_interval_s: float = BEAT_INTERVAL_S) -> None:
        # A call is to be made on the loop thread, by somebody in this process.
        self.inbox: queue.SimpleQueue[EngineInput | Callable[[], None]] = queue.SimpleQueue()
        self.vitals = LoopVitals()
        self.corrupt_messages = 0
        self.is_watched = False  # written by the I/O thread, read by the loop thread
        self._beat_interval_s = beat_interval_s
        self._outgoing: deque[Outgoing] = deque()
        self._is_stopping = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.SNDHWM, _SEND_HIGH_WATER_MARK)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(f"ipc://{socket_path}")
        self._front_ends: dict[bytes, _FrontEnd] = {}
        self._routes: dict[str, _FrontEnd] = {}
        self._queries: dict[str, _FrontEnd] = {}
        self._announcement: Announcement | None = None
        self._is_greeted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-io", daemon=True)

    # --- for the loop thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def publish(self, outputs: list[RequestOutput]) -> None:
        """Send a step's outputs to the front ends that wait for them."""
        if outputs:
            self._post(outputs)

    def announce(self, announcement: Announcement) -> None:
        """Tell every front end, also one that connects later."""
        self._post(announcement)

    def wait_for_front_end(self, timeout_s: float) -> bool:
        """Wait until one has connected, so that an announcement made before is not lost by an exit."""
        return self._is_greeted.wait(timeout_s)

    def answer(self, reply: Reply) -> None:
        """Send a reply to the front end that asked."""
        self._post(reply)

    def publish_steps(self, batch: StepBatch) -> None:
        """Tell the front ends that watch what ran."""
        self._post(batch)

    def fail_all(self, error: OutputError) -> None:
        """End every request in flight with this error."""
        self._post(error)

    def stop(self) -> None:
        """Send what is queued, close the socket, end the thread."""
        self._is_stopping = True
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _post(self, item: Outgoing) -> None:
        self._outgoing.append(item)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes just as well
            os.write(self._wake_write, b"\0")

    # --- the I/O thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        next_beat = time.monotonic()
        try:
            while True:
                ready = dict(poller.poll(max(0, math.ceil((next_beat - time.monotonic()) * 1000))))
                if self._socket in ready:
                    self._receive()
                if self._wake_read in ready:
                    self._drain_wake_pipe()
                is_stopping = self._is_stopping  # read before sending: what was posted before it still leaves
                self._send_outgoing()
                if is_stopping:
                    return
                if time.monotonic() >= next_beat:
                    self._beat()
                    next_beat = time.monotonic() + self._beat_interval_s
        except Exception:
            # Without this thread the engine is deaf and mute; an exit is noticed at once, silence only by the watchdog.
            logger.exception("the engine's I/O thread failed, the process exits")
            os._exit(1)
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _drain_wake_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._wake_read, 4096)) == 4096:
                pass

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                identity, data = frames
                message = decode_input(data)
            except (ValueError, msgspec.DecodeError) as error:
                self.corrupt_messages += 1
                logger.error("dropped a corrupt message of %d bytes: %s", sum(map(len, frames)), error)
                continue
            self._handle(identity, message)

    def _handle(self, identity: bytes, message: EngineInput) -> None:
        front_end = self._front_ends.get(identity)
        if front_end is None:
            front_end = self._front_ends[identity] = _FrontEnd(identity)
        match message:
            case Acknowledge():
                front_end.window.acknowledge(message.sequence)
                self._flush(front_end)
                return
            case Hello():
                self._greet(front_end)
                return
            case AddRequest():
                self._routes[message.request_id] = front_end
                if len(message.prompt) % 4 != 0:
                    self.corrupt_messages += 1
                    error = OutputError("the prompt's bytes are no token ids", "invalid_request")
                    self._route([RequestOutput(message.request_id, error=error)])
                    return
            case AbortRequests():
                for request_id in message.request_ids:
                    self._forget(request_id)
            case FinishRequest():
                self._forget(message.request_id)
            case SessionsQuery() | LoadModel() | UnloadModel() | SetQuota():
                self._queries[message.query_id] = front_end
            case WatchSteps():
                front_end.watches_steps = message.is_on
                self._count_watchers()
                return
            case Shutdown():
                logger.info("asked to stop")
        self.inbox.put(message)

    def _greet(self, front_end: _FrontEnd) -> None:
        """Where the engine stands, and its vitals."""
        if self._announcement is not None:
            self._send(front_end, encode(self._announcement))
        self._send(front_end, encode(self._make_beat()))
        self._is_greeted.set()

    def _forget(self, request_id: str) -> None:
        front_end = self._routes.pop(request_id, None)
        if front_end is not None:
            front_end.window.discard(request_id)

    def _send_outgoing(self) -> None:
        while self._outgoing:
            item = self._outgoing.popleft()
            if isinstance(item, list):
                self._route(item)
            elif isinstance(item, SessionsReply | AdminReply):
                front_end = self._queries.pop(item.query_id, None)
                if front_end is not None:
                    self._send(front_end, encode(item))
            elif isinstance(item, StepBatch):
                self._report_steps(item)
            elif isinstance(item, OutputError):
                self._route([RequestOutput(request_id, error=item) for request_id in self._routes])
            else:
                self._announcement = item
                for front_end in list(self._front_ends.values()):
                    self._greet(front_end)

    def _route(self, outputs: list[RequestOutput]) -> None:
        by_front_end: dict[bytes, list[RequestOutput]] = {}
        for output in outputs:
            # Unknown: its client has gone, or its reader was too slow; the scheduler hears of it through the inbox.
            front_end = self._routes.get(output.request_id)
            if front_end is None:
                continue
            by_front_end.setdefault(front_end.identity, []).append(output)
            if output.is_final:
                del self._routes[output.request_id]
        for identity, group in by_front_end.items():
            self._deliver(self._front_ends[identity], group)

    def _deliver(self, front_end: _FrontEnd, outputs: list[RequestOutput]) -> None:
        message = front_end.window.send_now(outputs)
        if message is not None:
            self._send_outputs(front_end, message)
            return
        given_up = front_end.window.offer(outputs)
        if given_up:
            logger.warning("%d requests aborted: their reader is too slow", len(given_up))
            for request_id in given_up:
                self._routes.pop(request_id, None)  # the window keeps their error for the front end
            self.inbox.put(AbortRequests(given_up))
        self._flush(front_end)

    def _flush(self, front_end: _FrontEnd) -> None:
        message = front_end.window.take()
        if message is not None:
            self._send_outputs(front_end, message)

    def _send_outputs(self, front_end: _FrontEnd, message: StepOutputs) -> None:
        if not self._send(front_end, encode(message)):
            front_end.window.take_back(message)

    def _send(self, front_end: _FrontEnd, data: bytes) -> bool:
        """False when the socket has no room for this front end; a front end that has gone takes its requests along."""
        try:
            self._socket.send_multipart((front_end.identity, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._disconnect(front_end)
        return True

    def _report_steps(self, batch: StepBatch) -> None:
        """Like beats, reports may be lost to a front end that has stopped reading."""
        watchers = [front_end for front_end in self._front_ends.values() if front_end.watches_steps]
        if watchers:
            data = encode(batch.report())
            for front_end in watchers:
                self._send(front_end, data)

    def _count_watchers(self) -> None:
        self.is_watched = any(front_end.watches_steps for front_end in self._front_ends.values())

    def _disconnect(self, front_end: _FrontEnd) -> None:
        self._front_ends.pop(front_end.identity, None)
        self._count_watchers()
        orphans = [request_id for request_id, owner in self._routes.items() if owner is front_end]
        logger.warning("a front end has gone, with %d requests in flight", len(orphans))
        for request_id in orphans:
            del self._routes[request_id]
        if orphans:
            self.inbox.put(AbortRequests(orphans))

    def _make_beat(self) -> Beat:
        vitals = self.vitals
        stats = msgspec.structs.replace(vitals.stats, corrupt_messages=self.corrupt_messages)
        return Beat(time.monotonic(), vitals.loop_stamp, vitals.step_limit_s, stats, vitals.times, vitals.model_stats)

    def _beat(self) -> None:
        data = encode(self._make_beat())
        for front_end in list(self._front_ends.values()):
            self._send(front_end, data)
            self._flush(front_end)  # outputs that found the socket full try again here
