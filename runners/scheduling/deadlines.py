"""Whose deadline comes next."""

from __future__ import annotations

import heapq

from runners.request import Request


class Deadlines:
    """A heap over the requests that have one; entries of requests that have ended are skipped when they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.number, request))

    def next(self) -> float | None:
        """Time of the earliest deadline of a live request [seconds of the scheduler's clock]."""
        while self._heap and self._heap[0][2].status.is_terminal:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_expired(self, now: float) -> list[Request]:
        """The live requests whose deadline has passed, earliest first."""
        expired = []
        while (deadline := self.next()) is not None and deadline <= now:
            expired.append(heapq.heappop(self._heap)[2])
        return expired
