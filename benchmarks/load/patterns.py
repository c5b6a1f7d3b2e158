"""When requests go out: bursts, a closed loop, at given times. Each returns the records and the seconds it took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from benchmarks.load.http_stream import Server
from benchmarks.load.records import Record, read
from benchmarks.load.workload import Request, Workload

OnRecord = Callable[[Record], None]


class Driver:
    """Sends a workload's requests to one server. `on_record` is called as each request ends."""

    def __init__(self, server: Server, workload: Workload, on_record: OnRecord) -> None:
        self._server = server
        self._workload = workload
        self._on_record = on_record
        self._records: list[Record] = []

    async def bursts(self, requests: Sequence[Request], size: int) -> tuple[list[Record], float]:
        """`size` requests at once, the next ones when the last of them has ended."""
        await self._server.open(min(size, len(requests)))
        start = time.perf_counter()
        for first in range(0, len(requests), size):
            await asyncio.gather(*(self._send(request) for request in requests[first : first + size]))
        return self._records, time.perf_counter() - start

    async def closed(self, requests: Sequence[Request], concurrency: int) -> tuple[list[Record], float]:
        """`concurrency` clients, each sending its next request when its last one has ended.

        Turns of one conversation stay with one client, in order.
        """
        threads = _conversations(requests)
        queue = iter(threads)
        await self._server.open(min(concurrency, len(threads)))

        async def client() -> None:
            for turns in queue:
                for request in turns:
                    await self._send(request)

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        return self._records, time.perf_counter() - start

    async def timed(self, requests: Sequence[Request]) -> tuple[list[Record], float]:
        """Each at its planned time, whatever the server does; a turn also waits for the turn before it."""
        start = time.perf_counter()

        async def one_thread(turns: Sequence[Request]) -> None:
            for request in turns:
                planned_at = start + (request.at_s or 0.0)
                if (wait_s := planned_at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                late_s = 0.0 if request is not turns[0] else time.perf_counter() - planned_at
                await self._send(request, late_s)

        await asyncio.gather(*(one_thread(turns) for turns in _conversations(requests)))
        return self._records, time.perf_counter() - start

    async def _send(self, request: Request, late_s: float = 0.0) -> None:
        exchange = await self._server.exchange(self._workload.path, self._workload.body(request))
        record = read(request, exchange, late_s)
        if record.ok:
            self._workload.answered(request, record.text, record.token_ids)
        self._records.append(record)
        self._on_record(record)


def _conversations(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests grouped into conversations (one that belongs to none is alone), in order of their first turns."""
    threads: dict[object, list[Request]] = {}
    for request in requests:
        threads.setdefault(request.index if request.conversation is None else request.conversation, []).append(request)
    return list(threads.values())
