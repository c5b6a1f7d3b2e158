"""SIGTERM and SIGINT begin a drain; only after it does the HTTP server react in its own way.

The server's reaction closes the listening socket first, which would leave probes hanging instead of red.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DrainSignals:
    """Handlers that run `drain` once, then hand the first signal to the handler that was there before.

    A terminal's Ctrl-C reaches the process twice (SIGINT from the terminal, SIGTERM from the supervisor), so only a
    second SIGINT means that someone is in a hurry: it goes to the previous handler at once.
    """

    def __init__(self, drain: Callable[[], Awaitable[None]]) -> None:
        self._drain = drain
        self._previous: dict[int, object] = {}
        self._num_interrupts = 0
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def install(self) -> None:
        """Call on the main thread, on the running asyncio loop, after the server has installed its own."""
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            self._hand_on(number)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin, number)

    def _begin(self, number: int) -> None:
        if self._task is None:
            assert self._loop is not None
            self._task = self._loop.create_task(self._drain_then_hand_on(number))

    async def _drain_then_hand_on(self, number: int) -> None:
        try:
            await self._drain()
        finally:
            self._hand_on(number)

    def _hand_on(self, number: int) -> None:
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, None)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
