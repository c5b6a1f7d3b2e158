"""One engine process from outside: start it, learn of its end, kill it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.loader import ResolvedProfile
from configs.schema import ModelSection
from runners.engine_settings import EngineSettings

_PROJECT_ROOT = Path(__file__).resolve().parent.parent
_POLL_INTERVAL_S = 0.2


class EngineProcess:
    """One child. Start it on the main thread: the kernel ties its life to the thread that started it.

    It serves `models`, by default the profile's.
    """

    def __init__(
        self, resolved: ResolvedProfile, socket_path: Path, models: Sequence[ModelSection] | None = None
    ) -> None:
        settings = EngineSettings(
            socket_path=str(socket_path),
            parent_pid=os.getpid(),
            profile_name=resolved.name,
            profile=resolved.profile,
            models=resolved.profile.models if models is None else tuple(models),
        )
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(_PROJECT_ROOT), os.environ.get("PYTHONPATH")) if part
        )
        environment["PYTHONSAFEPATH"] = "1"  # or a folder named `runners` where the user stands would be imported
        # Else torch's OpenMP threads spin for milliseconds after every parallel op, on cores that this process needs.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # A Ctrl-C that lands before the child ignores signals would kill it: it is born with them blocked.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "runners.engine_core"], stdin=subprocess.PIPE, env=environment
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already: `exit_status` will tell
            self._popen.stdin.write(settings.to_json() + b"\n")
            self._popen.stdin.flush()  # stays open: its end of file tells the child that this process has gone

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: killed by that signal."""
        return self._popen.poll()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._popen.kill()

    async def wait(self) -> int:
        """Its exit status, as soon as there is one."""
        with self._exit_event() as event:
            while (status := self._popen.poll()) is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), _POLL_INTERVAL_S)
        self.close()
        return status

    @contextlib.contextmanager
    def _exit_event(self) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        try:
            fd = os.pidfd_open(self._popen.pid)
        except (AttributeError, OSError):  # not Linux, or reaped already: polling alone tells
            yield event
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, event.set)
        try:
            yield event
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
