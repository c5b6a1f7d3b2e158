"""The whole server on a real model, without BentoML: engine process, client and app behind uvicorn, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import uvicorn

from configs.loader import ResolvedProfile
from configs.schema import Profile
from runners.server import Server as Parts
from tests.support.http_server import Server

START_LIMIT_S = 120.0
# Of a server that does not tell: ids from here on are in nobody's vocabulary, and a context that few fall short of.
FOREIGN_VOCAB, FOREIGN_CONTEXT = 1_000_000, 2048


@contextlib.contextmanager
def engine_server(source: str, **sections: Any) -> Iterator[str]:
    """URL of a server of the model at `source`; `sections` of the profile replace the defaults of a small CPU host."""
    small: dict[str, Any] = {
        "engine": {"slots": 8, "cpu_cores": 1},
        "admission": {"cold_window_us": 0, "cold_silence_us": 0},
        "kv": {"pool": {"sequences": 4}},
    }
    model = {"source": source, "served_names": ["m"], **sections.pop("model", {})}
    profile = Profile.model_validate({**small, **sections, "models": [model]})
    ready: Future[str] = Future()
    stop: asyncio.Event | None = None
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        nonlocal stop
        stop = asyncio.Event()
        parts = Parts(ResolvedProfile(profile, "test", {}), "test")
        parts.start_feed()
        parts.supervisor.start()
        config = uvicorn.Config(parts.app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve())
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while not (server.started and parts.is_ready):
                    if not parts.is_alive:
                        raise RuntimeError(parts.client.state.detail)
                    await asyncio.sleep(0.02)
            ready.set_result(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
            await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            server.should_exit = True
            await task
            await parts.stop()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        yield ready.result(START_LIMIT_S + 10)
    finally:
        if stop is not None:
            loop.call_soon_threadsafe(stop.set)
        thread.join(60)


@contextlib.asynccontextmanager
async def server_at(url: str) -> AsyncIterator[Server]:
    """What the HTTP tests use, for a server behind a URL."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]
        vocab_size, max_context = model.get("vocab_size", FOREIGN_VOCAB), model.get("max_model_len", FOREIGN_CONTEXT)
        yield Server(client, model["id"], vocab_size, max_context)
