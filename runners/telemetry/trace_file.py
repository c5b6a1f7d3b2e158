"""The trace file: a JSON array that lacks its closing bracket until it is finished, which viewers accept.

A thread of its own writes it, so that a slow disk delays no step. Its size is bounded: past half of the limit the
file is finished and becomes the older one, and a new one begins.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from runners.errors import StartupError
from runners.telemetry.step_observer import StepBatch
from runners.telemetry.trace_events import Event, TraceEvents

if TYPE_CHECKING:
    from configs.operation import TelemetrySection

logger = logging.getLogger(__name__)

_MAX_BATCHES = 200
"""That may wait for the disk: ten seconds' worth. More are left out of the trace."""


def older_path(path: Path) -> Path:
    """Where the file before the current one lies."""
    return path.with_name(f"{path.stem}.older{path.suffix}")


class TraceFile:
    """OSError when the file cannot be made; one that cannot be written later (a full disk) ends the trace with one log
    line, not the engine."""

    def __init__(self, path: Path, max_bytes: int, *, wants_emissions: bool = False) -> None:
        self.wants_emissions = wants_emissions
        self.num_dropped = 0
        self._path = path
        self._half_bytes = max_bytes // 2
        self._events = TraceEvents()
        self._encode = msgspec.json.Encoder().encode
        self._batches: queue.Queue[StepBatch | None] = queue.Queue(_MAX_BATCHES)
        self._num_bytes = 0
        self._has_failed = False
        self._file = self._begin()
        self._thread = threading.Thread(target=self._run, name="trace-file", daemon=True)
        self._thread.start()

    # --- the loop thread --------------------------------------------------------------------------------------------

    def put(self, batch: StepBatch) -> None:
        """Have it written; never waits."""
        try:
            self._batches.put_nowait(batch)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what is left and finish the file."""
        self._batches.put(None)
        self._thread.join()
        if self.num_dropped:
            logger.warning("the trace file lacks %d batches: the disk was too slow", self.num_dropped)

    # --- the thread that writes -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            if not self._has_failed:
                self._attempt(batch)
        if not self._has_failed:
            self._attempt(None)

    def _attempt(self, batch: StepBatch | None) -> None:
        try:
            if batch is None:
                self._write(self._events.close())
                self._finish()
                return
            if self._num_bytes > self._half_bytes:
                self._finish()
                self._file = self._begin()
            self._write(self._events.of(batch))
            self._file.flush()
        except OSError as error:
            self._has_failed = True
            logger.error("the trace is no longer written: %s: %s", self._path, error.strerror)

    def _begin(self) -> BinaryIO:
        """A new file; the one that lies there, of before or of an engine that crashed, becomes the older one."""
        if self._path.exists():
            self._path.replace(older_path(self._path))
        file = self._path.open("wb")
        self._file = file
        header = list(self._events.header())
        self._num_bytes = file.write(b"[\n" + self._encode(header[0]))
        self._write(header[1:])
        file.flush()
        return file

    def _write(self, events: Iterable[Event]) -> None:
        # The comma comes before: after every event the file is valid JSON but for its bracket.
        data = b"".join(b",\n" + self._encode(event) for event in events)
        self._num_bytes += self._file.write(data)

    def _finish(self) -> None:
        self._file.write(b"\n]\n")
        self._file.close()


def open_trace(settings: TelemetrySection) -> TraceFile | None:
    """For the profile's `telemetry.perfetto_file`. StartupError when the file cannot be made."""
    if settings.perfetto_file is None:
        return None
    path = Path(settings.perfetto_file)
    try:
        if path.exists() and not path.is_file():  # it would be renamed: a device, a pipe or a folder of the machine
            raise OSError(errno.EINVAL, "not a regular file")
        return TraceFile(path, settings.perfetto_max_bytes, wants_emissions=settings.emit_trace)
    except OSError as error:
        raise StartupError(f"telemetry.perfetto_file: {settings.perfetto_file}: {error.strerror}") from error
