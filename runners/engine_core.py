"""The engine process: loads the models, then runs the loop (`runners.engine_loop`) until it is told to stop.

`python -m runners.engine_core` is that process: settings come as one JSON line on stdin, whose end of file means that
the HTTP process has gone.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from pathlib import Path

from runners.engine_io import EngineIO
from runners.engine_loop import EXIT_DEVICE_LOST, EXIT_LOOP_FAILED, EXIT_STOPPED, EngineCore
from runners.engine_settings import EngineSettings
from runners.engine_startup import LoadedModel, ModelLoader
from runners.errors import StartupError
from runners.messages import (
    Progress,
    StartupFailed,
)
from runners.process_guard import die_with_parent, exit_at_end_of_file
from runners.simulation.recorder import ArrivalRecorder, open_recorder
from runners.telemetry.trace_file import TraceFile, open_trace

logger = logging.getLogger("runners.engine_core")

__all__ = ["EXIT_DEVICE_LOST", "EXIT_LOOP_FAILED", "EXIT_STARTUP_FAILED", "EXIT_STOPPED", "EngineCore", "main"]

EXIT_STARTUP_FAILED = 2

# The I/O thread waits this long at most for the interpreter lock while the loop runs Python (default: 5 ms).
_SWITCH_INTERVAL_S = 0.0005
_FRONT_END_TIMEOUT_S = 10.0


def _load(loader: ModelLoader, io: EngineIO) -> list[LoadedModel]:
    try:
        return loader.load_all(lambda phase, detail, fraction: io.announce(Progress(phase, detail, fraction)))
    except StartupError:
        raise
    except Exception as error:  # no file or setting we know of: the next start would fail alike, so tell, do not retry
        logger.error("loading failed in a way that is not foreseen", exc_info=True)
        reason = str(error).strip().splitlines() or ["no reason given"]
        raise StartupError(f"{type(error).__name__}: {reason[0]}") from error


def _serve(settings: EngineSettings) -> int:
    io = EngineIO(Path(settings.socket_path))
    io.start()
    core: EngineCore | None = None
    recorder: ArrivalRecorder | None = None
    trace: TraceFile | None = None
    try:
        recorder = open_recorder(settings.profile.telemetry.arrivals_file, settings.profile.kv.session_ttl_s)
        trace = open_trace(settings.profile.telemetry)
        loader = ModelLoader(settings)
        models = _load(loader, io)
        gc.collect()
        gc.freeze()
        gc.disable()
        core = EngineCore(
            io,
            models,
            loader=loader,
            hung_factor=settings.profile.watchdog.hung_factor,
            hung_min_s=settings.profile.watchdog.hung_min_s,
            recorder=recorder,
            phase_profile_steps=settings.profile.telemetry.phase_profile_steps,
            trace=trace,
        )
        core.announce_models()
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
        if core is not None:
            core.close()


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
