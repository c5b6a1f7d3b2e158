"""`/health`, `/livez`, `/readyz`, `/version`: is the process up, does the engine answer, how far is the start."""

from __future__ import annotations

import time

import msgspec

from runners.api.endpoint import Endpoint, Exchange
from runners.errors import EngineUnavailableError

_GET = ("GET", "HEAD")


class Health(Endpoint):
    """200 while the engine takes requests, else 503; the body tells the phase and its progress either way."""

    methods = _GET
    is_public = True

    async def handle(self, exchange: Exchange) -> None:
        try:
            engine = self.engine
        except EngineUnavailableError as error:
            starting = {"status": "starting", "ready": False, "detail": error.message}
            await exchange.reply(msgspec.json.encode(starting), status=503)
            return
        state = engine.state
        report = {
            "status": "ok" if engine.is_ready else state.phase,
            "ready": engine.is_ready,
            "detail": state.detail,
            "progress": state.fraction,
            "phase_s": round(max(0.0, time.monotonic() - state.since), 3),
            "models": [name for info in engine.models for name in info.served_names],
            "engine": msgspec.structs.asdict(engine.stats),
        }
        await exchange.reply(msgspec.json.encode(report), status=200 if engine.is_ready else 503)


class Live(Endpoint):
    """200 while this process answers."""

    methods = _GET
    is_public = True

    async def handle(self, exchange: Exchange) -> None:
        await exchange.reply(b'{"status":"ok"}')


class Ready(Endpoint):
    """200 while the engine takes requests, else 503 in the error shape."""

    methods = _GET
    is_public = True

    async def handle(self, exchange: Exchange) -> None:
        if not self.engine.is_ready:
            raise EngineUnavailableError(f"The engine is not ready: {self.engine.state.phase}.")
        await exchange.reply(b'{"status":"ok"}')


class Version(Endpoint):
    methods = _GET
    is_public = True

    async def handle(self, exchange: Exchange) -> None:
        await exchange.reply(msgspec.json.encode({"version": self.settings.version}))
