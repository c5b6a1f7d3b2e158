"""The engine loop: receive, schedule, launch, commit the step before, reply. Nothing else runs on its thread.

`python -m runners.engine_core` is the engine process: settings come as one JSON line on stdin, whose end of file
means that the HTTP process has gone.
"""

from __future__ import annotations

import gc
import logging
import queue
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

from runners.engine_io import EngineIO
from runners.engine_settings import EngineSettings
from runners.engine_startup import LoadedEngine, load_engine
from runners.errors import StartupError
from runners.execution.executor import DeviceLostError, Executor, LaunchError, StepResult
from runners.grammar.compiler import GrammarCompiler
from runners.grammar.gate import GrammarGate
from runners.kv_cache.session_queries import answer_query
from runners.loop_profile import LoopProfile
from runners.messages import (
    AbortRequests,
    AddRequest,
    EngineInput,
    FinishRequest,
    OutputError,
    Progress,
    Ready,
    RequestOutput,
    SessionsQuery,
    Shutdown,
    StartupFailed,
)
from runners.process_guard import die_with_parent, exit_at_end_of_file
from runners.scheduling.scheduler import Scheduler
from runners.scheduling.scheduler_output import StepPlan, Wait
from runners.simulation.recorder import ArrivalRecorder, open_recorder
from runners.step_clock import StepClock
from runners.telemetry.step_observer import StepObserver
from runners.telemetry.trace_file import TraceFile, open_trace

logger = logging.getLogger("runners.engine_core")

EXIT_STOPPED = 0
EXIT_STARTUP_FAILED = 2
EXIT_DEVICE_LOST = 3
EXIT_LOOP_FAILED = 4

_STATS_INTERVAL_S = 0.25
_COLLECT_GARBAGE_INTERVAL_S = 10.0
# How long the loop may sleep on its queue while a flight is under way on the device, which cannot wake it.
_FLIGHT_POLL_S = 0.0005
# The I/O thread waits this long at most for the interpreter lock while the loop runs Python (default: 5 ms).
_SWITCH_INTERVAL_S = 0.0005
_FRONT_END_TIMEOUT_S = 10.0
# An engine without work for this long prepares what it may need: a piece takes about as long, and delays who comes.
_IDLE_BEFORE_PREPARING_S = 0.02


class EngineCore:
    """Drives one scheduler and one executor; owns the thread that calls `run`."""

    def __init__(
        self,
        io: EngineIO,
        scheduler: Scheduler,
        executor: Executor,
        *,
        served_names: Collection[str],
        hung_factor: float = 20.0,
        hung_min_s: float = 30.0,
        grammars: GrammarCompiler | None = None,
        recorder: ArrivalRecorder | None = None,
        phase_profile_steps: int = 0,
        trace: TraceFile | None = None,
    ) -> None:
        self._io = io
        self._gate = GrammarGate(grammars, io.inbox.put)
        self._scheduler = scheduler
        self._executor = executor
        self._recorder = recorder
        self._served_names = frozenset(served_names)
        self._pipeline_depth = executor.capabilities.pipeline_depth
        self._profile = LoopProfile(phase_profile_steps)
        self._observer = StepObserver(
            min(served_names), scheduler, lambda: io.is_watched, io.publish_steps, trace, self._profile
        )
        self._clock = StepClock(io.vitals, hung_factor, hung_min_s, self._profile, self._observer)
        self._is_stopping = False
        self._has_idle_work = True
        self._next_stats = 0.0
        self._next_garbage = time.monotonic() + _COLLECT_GARBAGE_INTERVAL_S

    def run(self) -> int:
        """Until `Shutdown`, or until the device or the loop itself fails; returns the process's exit status."""
        self._update_stats()
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
        return EXIT_STOPPED

    def _turn(self) -> None:
        """One turn: what has arrived, one plan, one result."""
        while not self._io.inbox.empty():
            self._receive(self._io.inbox.get())
        mark = self._profile.mark
        mark("receive")
        if self._is_stopping:
            return  # or the turn might end asleep on a queue that nobody will fill
        plan = self._scheduler.schedule(time.monotonic())
        mark("schedule")
        if isinstance(plan, StepPlan):
            self._launch(plan)
            mark("launch")
            if self._scheduler.num_uncommitted > self._pipeline_depth:
                self._commit_step()
        elif self._scheduler.num_uncommitted > 0:
            self._commit_step()
        elif self._scheduler.num_flights > 0:
            self._scheduler.commit(None, self._completed_flights(), time.monotonic())
        mark("commit")
        self._publish()
        mark("publish")
        if isinstance(plan, Wait) and self._scheduler.num_uncommitted == 0:
            self._sleep(plan)
            mark("idle")

    def _receive(self, message: EngineInput) -> None:
        now = time.monotonic()
        match message:
            case AddRequest():
                if message.model in self._served_names:
                    if not self._gate.passes(message):
                        return
                    if self._recorder is not None:
                        self._recorder.arrived(message)
                    self._scheduler.add_request(message, now)
                else:
                    error = OutputError(f"The model {message.model!r} does not exist.", "model_not_found")
                    self._io.publish([RequestOutput(message.request_id, error=error)])
            case AbortRequests():
                for request_id in message.request_ids:
                    self._gate.abort(request_id)
                    self._scheduler.abort(request_id, now)
                    self._record_end(request_id)
            case FinishRequest():
                self._scheduler.finish(message.request_id, message.keep_tokens, now)
                self._record_end(message.request_id)
            case SessionsQuery():
                self._io.answer(answer_query(self._scheduler.cache.sessions, message, now))
            case Shutdown():
                self._is_stopping = True

    def _record_end(self, request_id: str) -> None:
        if self._recorder is not None:
            self._recorder.ended(request_id)

    def _launch(self, plan: StepPlan) -> None:
        self._clock.launch(plan)
        try:
            self._executor.launch(plan)
        except LaunchError as error:
            logger.warning("step %d could not be launched: %s", plan.step_id, error)
            self._scheduler.launch_failed(plan, OutputError(str(error), "request_failed"), time.monotonic())

    def _commit_step(self) -> None:
        result = self._executor.collect()
        self._profile.mark("collect")
        self._clock.complete(result.step_id)
        self._scheduler.commit(result, self._completed_flights(), time.monotonic())

    def _completed_flights(self) -> tuple[tuple[int, StepResult], ...]:
        flights = self._executor.completed_flights()
        for _, result in flights:
            self._clock.land(result.step_id)
        return flights

    def _publish(self) -> None:
        outputs = self._scheduler.take_outputs()
        self._io.publish(outputs)
        self._observer.published(outputs)
        if self._recorder is not None:
            self._recorder.published(outputs)
        for notice in self._scheduler.take_notices():
            logger.info("%s", notice)
        now = time.monotonic()
        if now >= self._observer.next_flush:
            self._observer.flush(now)
        if now >= self._next_stats:
            self._update_stats()

    def _update_stats(self) -> None:
        self._io.vitals.stats = self._scheduler.stats()
        self._io.vitals.times = self._profile.snapshot()
        if self._recorder is not None:
            self._recorder.flush()
        now = time.monotonic()
        self._next_stats = now + _STATS_INTERVAL_S
        if now >= self._next_garbage:
            # The collector is off during steps. The youngest generation is what grew since the last time.
            gc.collect(0 if self._scheduler.has_work else 2)
            self._next_garbage = now + _COLLECT_GARBAGE_INTERVAL_S

    def _sleep(self, plan: Wait) -> None:
        """Wait for a message, at most until the plan's time. The step in flight is waited for in `collect`."""
        timeout_s: float | None = _FLIGHT_POLL_S
        if self._scheduler.num_flights == 0:
            self._clock.idle()
            self._update_stats()
            self._observer.flush_rest()
            timeout_s = None if plan.until is None else max(0.0, plan.until - time.monotonic())
        if timeout_s is None and self._has_idle_work:
            timeout_s = _IDLE_BEFORE_PREPARING_S
        try:
            message = self._io.inbox.get(timeout=timeout_s)
        except queue.Empty:
            if timeout_s == _IDLE_BEFORE_PREPARING_S:
                self._has_idle_work = self._executor.use_idle_time()
            return
        self._has_idle_work = True
        self._receive(message)

    def _end_everything(self, reason: str) -> None:
        self._clock.idle()
        self._io.fail_all(OutputError(reason, "engine_unavailable"))


def _load(settings: EngineSettings, io: EngineIO) -> LoadedEngine:
    try:
        return load_engine(settings, lambda phase, detail, fraction: io.announce(Progress(phase, detail, fraction)))
    except StartupError:
        raise
    except Exception as error:  # no file or setting we know of: the next start would fail alike, so tell, do not retry
        logger.error("loading failed in a way that is not foreseen", exc_info=True)
        reason = str(error).strip().splitlines() or ["no reason given"]
        raise StartupError(f"{type(error).__name__}: {reason[0]}") from error


def _serve(settings: EngineSettings) -> int:
    io = EngineIO(Path(settings.socket_path))
    io.start()
    engine: LoadedEngine | None = None
    recorder: ArrivalRecorder | None = None
    trace: TraceFile | None = None
    try:
        recorder = open_recorder(settings.profile.telemetry.arrivals_file, settings.profile.kv.session_ttl_s)
        trace = open_trace(settings.profile.telemetry)
        engine = _load(settings, io)
        gc.collect()
        gc.freeze()
        gc.disable()
        io.vitals.stats = engine.scheduler.stats()
        io.announce(Ready([engine.info]))
        core = EngineCore(
            io,
            engine.scheduler,
            engine.executor,
            served_names=engine.info.served_names,
            hung_factor=settings.profile.watchdog.hung_factor,
            hung_min_s=settings.profile.watchdog.hung_min_s,
            grammars=engine.grammars,
            recorder=recorder,
            phase_profile_steps=settings.profile.telemetry.phase_profile_steps,
            trace=trace,
        )
        return core.run()
    except StartupError as error:
        io.announce(StartupFailed(str(error)))
        if not io.wait_for_front_end(_FRONT_END_TIMEOUT_S):  # which logs it
            logger.error("start-up failed: %s", error)
        return EXIT_STARTUP_FAILED
    finally:
        io.stop()
        if recorder is not None:
            recorder.close()
        if trace is not None:
            trace.close()
        if engine is not None:
            engine.executor.close()
            if engine.grammars is not None:
                engine.grammars.close()


def main() -> int:
    """The engine process: signals are the parent's business, this process stops on `Shutdown` or with its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = EngineSettings.from_json(sys.stdin.buffer.readline())
    die_with_parent(settings.parent_pid)
    exit_at_end_of_file(sys.stdin.fileno())
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s [%(levelname)s] [engine] %(message)s"
    )
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    return _serve(settings)


if __name__ == "__main__":
    sys.exit(main())
