"""Our app behind a real uvicorn in a thread: sockets, backpressure and disconnects as in production."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from tests.support.scripted_engine import ScriptedEngine, Submission


@dataclass
class LiveServer:
    url: str
    port: int
    engine: ScriptedEngine
    loop: asyncio.AbstractEventLoop

    def wait_for_submission(self, index: int = 0) -> Submission:
        self.wait_until(lambda: len(self.engine.submissions) > index)
        return self.engine.submissions[index]

    @staticmethod
    def wait_until(condition: object, limit_s: float = 20.0) -> None:
        assert callable(condition)
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)


@contextmanager
def live_server(app: ASGIApp, engine: ScriptedEngine) -> Iterator[LiveServer]:
    """Serves on a free port until the block ends."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    LiveServer.wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield LiveServer(f"http://127.0.0.1:{port}", port, engine, loops[0])
    finally:
        server.should_exit = True
        thread.join(20)
