"""The loop of the engine process: receive, schedule, launch, commit the step before, reply. Nothing else runs on its
thread.

Each model has its scheduler and executor (`runners.served_model`); the arbiter says whose plan is the most urgent.
"""

from __future__ import annotations

import gc
import logging
import queue
import time
from collections.abc import Callable, Sequence

from runners.engine_admin import EngineAdmin
from runners.engine_io import EngineIO
from runners.engine_startup import LoadedModel, ModelLoader
from runners.execution.executor import DeviceLostError
from runners.kv_cache.session_queries import answer_query
from runners.loop_profile import LoopProfile
from runners.messages import (
    AbortRequests,
    AddRequest,
    EngineInput,
    FinishRequest,
    LoadModel,
    OutputError,
    Ready,
    RequestOutput,
    SessionsQuery,
    SessionsReply,
    SetQuota,
    Shutdown,
    UnloadModel,
    sum_stats,
)
from runners.scheduling.arbiter import Arbiter
from runners.scheduling.scheduler_output import StepPlan
from runners.served_model import LoopParts, ServedModel
from runners.simulation.recorder import ArrivalRecorder
from runners.telemetry.trace_file import TraceFile

logger = logging.getLogger("runners.engine_core")

EXIT_STOPPED = 0
EXIT_DEVICE_LOST = 3
EXIT_LOOP_FAILED = 4

_STATS_INTERVAL_S = 0.25
_COLLECT_GARBAGE_INTERVAL_S = 10.0
# How long the loop may sleep on its queue while a flight is under way on the device, which cannot wake it.
_FLIGHT_POLL_S = 0.0005
# An engine without work for this long prepares what it may need: a piece takes about as long, and delays who comes.
_IDLE_BEFORE_PREPARING_S = 0.02


class EngineCore:
    """Drives the scheduler and executor of each model; owns the thread that calls `run`.

    Without a `loader` no model can be added while it runs.
    """

    def __init__(
        self,
        io: EngineIO,
        models: Sequence[LoadedModel],
        *,
        loader: ModelLoader | None = None,
        hung_factor: float = 20.0,
        hung_min_s: float = 30.0,
        recorder: ArrivalRecorder | None = None,
        phase_profile_steps: int = 0,
        trace: TraceFile | None = None,
    ) -> None:
        self.models: list[ServedModel] = []
        self._io = io
        self._recorder = recorder
        self._profile = LoopProfile(phase_profile_steps)
        self._parts = LoopParts(io, self._profile, trace, hung_factor, hung_min_s)
        self._by_name: dict[str, ServedModel] = {}
        self._arbiter = Arbiter()
        self._admin = EngineAdmin(io, loader, self)
        self._device_free_at = 0.0
        self._is_stopping = False
        self._has_idle_work = True
        self._next_stats = 0.0
        self._next_garbage = time.monotonic() + _COLLECT_GARBAGE_INTERVAL_S
        for model in models:
            self.add_model(model)

    # --- models ---------------------------------------------------------------------------------------------------

    def add_model(self, loaded: LoadedModel) -> None:
        """Serve one more model from the next turn on."""
        model = ServedModel(loaded, self._parts)
        self.models.append(model)
        self._by_name.update(dict.fromkeys(loaded.info.served_names, model))
        self._arbiter.join(model.name)
        self._has_idle_work = True
        if len(self.models) == 1:
            model.observer.take_phases(self._profile)

    def remove_model(self, model: ServedModel) -> None:
        """Serve it no longer. It has no work."""
        self.models.remove(model)
        self._by_name = {name: other for name, other in self._by_name.items() if other is not model}
        self._arbiter.leave(model.name)
        if self.models:
            self.models[0].observer.take_phases(self._profile)

    def announce_models(self) -> None:
        """Tell the front ends what is served now."""
        self.update_stats()
        self._io.announce(Ready([model.info for model in self.models if model.draining_until is None]))

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until `Shutdown`, or until the device or the loop itself fails; returns the process's exit status."""
        self.update_stats()
        try:
            while not self._is_stopping:
                self._turn()
        except DeviceLostError as error:
            logger.critical("device lost: %s", error)
            self._end_everything(f"The device failed: {error}")
            return EXIT_DEVICE_LOST
        except Exception as error:
            logger.critical("the engine loop failed", exc_info=True)
            self._end_everything(f"The engine failed: {type(error).__name__}.")
            return EXIT_LOOP_FAILED
        for model in self.models:
            model.observer.flush_rest()
        return EXIT_STOPPED

    def _turn(self) -> None:
        """One turn: what has arrived, one plan, one result."""
        while not self._io.inbox.empty():
            self._receive(self._io.inbox.get())
        mark = self._profile.mark
        mark("receive")
        if self._is_stopping:
            return  # or the turn might end asleep on a queue that nobody will fill
        if self._admin.next_deadline is not None:
            self._admin.drain(time.monotonic())
        launched, until = self._launch_one()
        has_changed = self._commit(launched) or launched is not None
        mark("commit")
        self._publish()
        mark("publish")
        # What was committed may have made room for somebody: then the next turn asks again before anyone sleeps.
        if not has_changed and not any(model.scheduler.num_uncommitted for model in self.models):
            self._sleep(until)
            mark("idle")

    def _receive(self, message: EngineInput | Callable[[], None]) -> None:
        now = time.monotonic()
        match message:
            case AddRequest():
                self._add(message, now)
            case AbortRequests():
                for request_id in message.request_ids:
                    for model in self.models:
                        model.gate.abort(request_id)
                        model.scheduler.abort(request_id, now)
                    self._record_end(request_id)
            case FinishRequest():
                for model in self.models:
                    model.scheduler.finish(message.request_id, message.keep_tokens, now)
                self._record_end(message.request_id)
            case SessionsQuery():
                self._io.answer(self._answer_sessions(message, now))
            case LoadModel() | UnloadModel() | SetQuota():
                self._admin.handle(message)
            case Shutdown():
                self._is_stopping = True
            case _ if callable(message):
                message()

    def _add(self, message: AddRequest, now: float) -> None:
        model = self._by_name.get(message.model)
        if model is None:
            error = OutputError(f"The model {message.model!r} does not exist.", "model_not_found")
            self._io.publish([RequestOutput(message.request_id, error=error)])
        elif model.draining_until is not None:
            self._io.publish([model.refusal(message)])
        elif model.gate.passes(message):
            if self._recorder is not None:
                self._recorder.arrived(message)
            model.scheduler.add_request(message, now)

    def _answer_sessions(self, query: SessionsQuery, now: float) -> SessionsReply:
        model = self._by_name.get(query.model)
        if model is None:
            error = OutputError(f"The model {query.model!r} does not exist.", "model_not_found")
            return SessionsReply(query.query_id, error=error)
        return answer_query(model.scheduler.cache.sessions, query, now)

    def _record_end(self, request_id: str) -> None:
        if self._recorder is not None:
            self._recorder.ended(request_id)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _launch_one(self) -> tuple[ServedModel | None, float | None]:
        """Launch the most urgent plan; (its model, None), or (None, until when nobody has one)."""
        until: float | None = None
        for model in self._candidates():
            plan = model.schedule(time.monotonic())
            self._profile.mark("schedule")
            if isinstance(plan, StepPlan):
                self._arbiter.launched(model.name)
                model.launch(plan)
                self._profile.mark("launch")
                return model, None
            if plan.until is not None:
                until = plan.until if until is None else min(until, plan.until)
        return None, until

    def _candidates(self) -> Sequence[ServedModel]:
        """Who may have something to launch, the most urgent first."""
        if len(self.models) == 1:
            return self.models
        with_work = []
        for model in self.models:
            has_work = model.scheduler.has_work
            if has_work and not model.had_work:
                self._arbiter.woke(model.name)
            model.had_work = has_work
            if has_work:
                with_work.append((model.name, model.scheduler.num_uncommitted))
        return [self._by_name[name] for name in self._arbiter.order(with_work)]

    def _commit(self, launched: ServedModel | None) -> bool:
        """Commit the oldest step when the next one has to wait for it, and what has come back beside it. True when a
        step was committed."""
        has_committed = False
        under_way = [model for model in self.models if model.scheduler.num_uncommitted]
        if under_way and (launched is None or launched.is_behind):
            self._commit_step(min(under_way, key=lambda model: model.oldest_launch))
            has_committed = True
        for model in self.models:
            if model is not launched and model.scheduler.num_uncommitted and model.executor.is_ready():
                self._commit_step(model)
                has_committed = True
            elif model.scheduler.num_flights and not model.scheduler.num_uncommitted:
                model.commit_flights()
        return has_committed

    def _commit_step(self, model: ServedModel) -> None:
        launched_at = model.commit_step()
        now = time.monotonic()
        self._arbiter.ran(model.name, now - max(launched_at, self._device_free_at))
        self._device_free_at = now

    def _publish(self) -> None:
        now = time.monotonic()
        for model in self.models:
            outputs = model.scheduler.take_outputs()
            self._io.publish(outputs)
            model.observer.published(outputs)
            if self._recorder is not None:
                self._recorder.published(outputs)
            for notice in model.scheduler.take_notices():
                logger.info("%s", notice)
            if now >= model.observer.next_flush:
                model.observer.flush(now)
        if now >= self._next_stats:
            self.update_stats()

    def update_stats(self) -> None:
        """What the next beat says."""
        vitals = self._io.vitals
        vitals.model_stats = {model.name: model.scheduler.stats() for model in self.models}
        vitals.stats = sum_stats(vitals.model_stats.values())
        vitals.times = self._profile.snapshot()
        if self._recorder is not None:
            self._recorder.flush()
        now = time.monotonic()
        self._next_stats = now + _STATS_INTERVAL_S
        if now >= self._next_garbage:
            # The collector is off during steps. The youngest generation is what grew since the last time.
            gc.collect(0 if any(model.scheduler.has_work for model in self.models) else 2)
            self._next_garbage = now + _COLLECT_GARBAGE_INTERVAL_S

    def _sleep(self, until: float | None) -> None:
        """Wait for a message, at most until that time. Steps in flight are waited for in `collect`."""
        timeout_s: float | None = _FLIGHT_POLL_S
        if not any(model.scheduler.num_flights for model in self.models):
            for model in self.models:
                model.clock.idle()
                model.observer.flush_rest()
            self.update_stats()
            deadline = self._admin.next_deadline
            if deadline is not None:
                until = deadline if until is None else min(until, deadline)
            timeout_s = None if until is None else max(0.0, until - time.monotonic())
        if timeout_s is None and self._has_idle_work:
            timeout_s = _IDLE_BEFORE_PREPARING_S
        try:
            message = self._io.inbox.get(timeout=timeout_s)
        except queue.Empty:
            if timeout_s == _IDLE_BEFORE_PREPARING_S:
                # A piece for one model at a time: whoever arrives meanwhile waits for no more than that.
                self._has_idle_work = any(model.executor.use_idle_time() for model in self.models)
            return
        self._has_idle_work = True
        self._receive(message)

    def _end_everything(self, reason: str) -> None:
        self._io.vitals.step_limit_s = None
        self._io.fail_all(OutputError(reason, "engine_unavailable"))

    def close(self) -> None:
        """Free the device."""
        for model in self.models:
            model.executor.close()
            if model.loaded.grammars is not None:
                model.loaded.grammars.close()
