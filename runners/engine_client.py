"""The asyncio half of the engine: submit a request, read its stream, abort it, and know whether the engine lives.

One `EngineClient` serves the whole life of the HTTP process. Engine processes come and go beneath it
(`runners.engine_process` starts them); each gets a new socket.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from runners.admin_client import AdminClient
from runners.engine_state import EnginePhase, EngineState, Vitals
from runners.errors import ConflictError, EngineUnavailableError, RequestFailedError, WavelaneError
from runners.ipc import ACKNOWLEDGE_EVERY, MAX_BUFFERED_TOKENS, FrontEndSocket
from runners.messages import (
    Acknowledge,
    AddRequest,
    AdminReply,
    Beat,
    EngineInput,
    EngineOutput,
    EngineStats,
    Hello,
    LoopTimes,
    ModelInfo,
    SessionFacts,
    SessionsReply,
    StepOutputs,
    StepsReport,
    WatchSteps,
    pack_ids,
    sum_stats,
)
from runners.open_streams import OpenStreams
from runners.queue_limits import QueueLimits
from runners.request import SamplingParams
from runners.request_metrics import RequestMetrics
from runners.request_stream import RequestStream
from runners.session_client import SessionClient
from runners.session_names import engine_name

logger = logging.getLogger(__name__)


class EngineClient:
    """Requests in, streams out. Belongs to one asyncio loop; constructing it starts nothing.

    `slots` is how many requests of one model the engine runs at once; `max_queued_requests` and `max_queued_tokens` may
    wait beyond them (`runners.queue_limits`).
    """

    def __init__(
        self,
        *,
        slots: int,
        max_queued_requests: int,
        beat_limit_s: float,
        max_queued_tokens: int | None = None,
        max_buffered_tokens: int = MAX_BUFFERED_TOKENS,
    ) -> None:
        self.models: list[ModelInfo] = []
        self.refused: dict[str, str] = {}  # why a model that the engine has loaded is not served, by its first name
        self.stats = EngineStats()
        self.model_stats: dict[str, EngineStats] = {}
        self.times = LoopTimes()
        self.metrics = RequestMetrics()
        self.restarts = 0
        self.corrupt_messages = 0
        self.vitals: Vitals | None = None
        self.on_announcement: Callable[[EngineOutput], None] = lambda message: None
        self.on_steps: Callable[[StepsReport], None] = lambda message: None
        self._state = EngineState(EnginePhase.STARTING, since=time.monotonic())
        self._first_names: dict[str, str] = {}
        self._leaving: set[str] = set()
        self._serves_nothing = False
        self._beat_limit_s = beat_limit_s
        self._socket: FrontEndSocket | None = None
        self._streams = OpenStreams(
            self.metrics,
            lambda: QueueLimits(slots, max_queued_requests, max_queued_tokens),
            self.send,
            max_buffered_tokens,
        )
        self._session_client = SessionClient(self.send)
        self.admin = AdminClient(self.send)
        self._last_sequence = 0
        self._acknowledged = 0
        self._watches_steps = False
        self.is_draining = False

    # --- what the API sees ----------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def is_ready(self) -> bool:
        """True while the engine takes requests, for one model at least, and shows signs of life."""
        return self.is_answering and not self._serves_nothing

    @property
    def is_answering(self) -> bool:
        """True while the engine has started and shows signs of life, also without a model."""
        if self._state.phase is not EnginePhase.READY or self.vitals is None:
            return False
        return self.vitals.fault(time.monotonic(), self._beat_limit_s) is None

    @property
    def num_open_streams(self) -> int:
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place."""
        return self._streams.num_queued

    async def submit(
        self,
        model: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        key_id: str = "",
        deadline_s: float | None = None,
        session_id: str | None = None,
        append_to_session: bool = False,
        cache_salt: str = "",
        follows: bool = False,
    ) -> RequestStream:
        """Send a request to the engine.

        Raises EngineUnavailableError while the engine is not ready, RateLimitError when the queue is full (one that
        `follows` another choice of its prompt is let in all the same),
        ConflictError when `request_id` is in flight already.
        """
        if not self.is_ready:
            raise EngineUnavailableError(f"The engine is not ready: {self._describe_state()}.")
        first_name = self._first_names.get(model, model)
        if not follows:
            self._streams.queue_of(first_name).check(len(prompt_ids))
        if request_id in self._streams:
            raise ConflictError(f"A request with the id {request_id!r} is in flight.")
        now = time.monotonic()
        message = AddRequest(
            request_id=request_id,
            model=model,
            prompt=pack_ids(prompt_ids),
            params=params,
            arrival_time=now,
            deadline=None if deadline_s is None else now + deadline_s,
            priority=priority,
            key_id=key_id,
            session_id=None if session_id is None else engine_name(key_id, session_id),
            append_to_session=append_to_session,
            cache_salt=cache_salt,
            follows=follows,
        )
        stream = self._streams.open(request_id, first_name, len(prompt_ids), now)
        self.send(message)
        return stream

    async def sessions(
        self, model: str, session_id: str | None = None, *, key_id: str = "", delete: bool = False
    ) -> list[SessionFacts]:
        """All sessions of a key on a model, or the one named; with `delete` it is gone afterwards.

        NotFoundError, ConflictError while a request has it, EngineUnavailableError while the engine does not answer.
        """
        if not self.is_ready:
            raise EngineUnavailableError(f"The engine is not ready: {self._describe_state()}.")
        return await self._session_client.ask(model, session_id, key_id, delete=delete)

    def watch_steps(self, is_on: bool) -> None:
        """Whether `on_steps` is to be called; an engine that nobody watches does not report its steps."""
        self._watches_steps = is_on
        self.send(WatchSteps(is_on))

    def _describe_state(self) -> str:
        if self._state.phase is EnginePhase.READY:
            return "it does not answer"
        return f"{self._state.phase} ({self._state.detail})" if self._state.detail else str(self._state.phase)

    # --- what the supervisor does ---------------------------------------------------------------------------------

    def attach(self, endpoint: str) -> None:
        """Speak to a new engine process. Call on the asyncio loop."""
        self.detach()
        now = time.monotonic()
        self.vitals = Vitals(last_beat=now, loop_stamp=now)
        self._last_sequence = self._acknowledged = 0
        self._socket = FrontEndSocket(endpoint, self._on_message)
        self._socket.send(Hello())
        if self._watches_steps:
            self._socket.send(WatchSteps(True))

    def detach(self, linger_ms: int = 0) -> None:
        """Forget the engine process; messages not yet sent get `linger_ms` to leave."""
        if self._socket is not None:
            self.corrupt_messages += self._socket.corrupt_messages
            self._socket.close(linger_ms)
            self._socket = None
        self.vitals = None
        self.admin.fail()
        self.stats = EngineStats()
        self.model_stats = {}
        self.times = LoopTimes()

    def fail_streams(self, error: WavelaneError) -> None:
        """Every open stream raises `error`, now."""
        self._streams.fail_all(error)

    async def wait_until_idle(self, deadline_s: float) -> bool:
        """Wait until no stream is open, at most `deadline_s`. True when none is."""
        return await self._streams.wait_until_idle(deadline_s)

    def set_state(self, phase: EnginePhase, detail: str = "", fraction: float | None = None) -> None:
        """Draining hides every phase but a failure."""
        if self.is_draining and phase is not EnginePhase.FAILED:
            phase = EnginePhase.DRAINING
        since = self._state.since if phase is self._state.phase else time.monotonic()
        self._state = EngineState(phase, detail, fraction, since)

    def set_models(self, models: list[ModelInfo]) -> None:
        """What the engine serves; a model that is on its way out is not taken back."""
        hidden = self._leaving | self.refused.keys()
        self.models = [info for info in models if info.served_names[0] not in hidden]
        self._first_names = {name: info.served_names[0] for info in models for name in info.served_names}
        self._serves_nothing = not self.models
        for info in self.models:
            self.metrics.of(info.served_names[0])  # so that its series are there before its first request

    def stop_serving(self, name: str) -> None:
        """No new requests for the model of this first name from now on."""
        self._leaving.add(name)
        self.set_models(self.models)

    def left(self, name: str) -> None:
        """The engine has unloaded it; a model of that name may come again."""
        self._leaving.discard(name)
        self.refused.pop(name, None)
        self._streams.forget_queue(name)

    def begin_drain(self) -> None:
        """Take no new requests from now on; those in flight go on."""
        self.is_draining = True
        self.set_state(EnginePhase.DRAINING)

    def send(self, message: EngineInput) -> None:
        """Queue a message for the engine; without an engine it is dropped with everything in flight."""
        if self._socket is not None:
            self._socket.send(message)

    # --- messages of the engine -----------------------------------------------------------------------------------

    def _on_message(self, message: EngineOutput) -> None:
        if isinstance(message, StepOutputs):
            self._on_outputs(message)
        elif isinstance(message, Beat):
            self.stats = message.stats
            self.model_stats = message.models
            self.times = message.times
            if self.vitals is not None:
                self.vitals.last_beat = time.monotonic()
                self.vitals.loop_stamp = message.loop_stamp
                self.vitals.step_limit_s = message.step_limit_s
        elif isinstance(message, StepsReport):
            self.model_stats = {**self.model_stats, message.model: message.stats}
            self.stats = sum_stats(self.model_stats.values())
            self.on_steps(message)
        elif isinstance(message, SessionsReply):
            self._session_client.answered(message)
        elif isinstance(message, AdminReply):
            if message.error is None:
                self.model_stats, self.stats = message.models, sum_stats(message.models.values())
            self.admin.answered(message)
        else:
            self.on_announcement(message)

    def _on_outputs(self, message: StepOutputs) -> None:
        if message.sequence != self._last_sequence + 1:
            self._lose_outputs(message.sequence)
        self._last_sequence = message.sequence
        now = time.monotonic()
        for output in message.outputs:
            self._streams.deliver(output, now)
        if message.sequence - self._acknowledged >= ACKNOWLEDGE_EVERY:
            self._acknowledged = message.sequence
            self.send(Acknowledge(message.sequence))

    def _lose_outputs(self, sequence: int) -> None:
        """A message of the engine was lost: any open stream may have a hole, so none may go on."""
        logger.error("outputs %d to %d of the engine are lost", self._last_sequence + 1, sequence - 1)
        self._streams.abort_all(RequestFailedError("Output of the engine was lost on its way."))

    @property
    def num_corrupt_messages(self) -> int:
        """Messages that could not be decoded, over every engine process so far."""
        return self.corrupt_messages + (self._socket.corrupt_messages if self._socket is not None else 0)
