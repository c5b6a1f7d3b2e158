"""What the page is fed with: one stream of server-sent events for all who look, made once and sent to each.

    opening   version, model, profile, the curves so far; again whenever the model or the engine's phase changes
    second    once a second: the engine's phase and stats, a new point of the curves
    steps     up to twenty times a second while steps run: `runners.messages.StepsReport`

The engine reports steps only while somebody looks. Buffers are bounded: a reader that lags is dropped, and its page
connects again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from configs.listing import Setting, settings_of
from configs.loader import ResolvedProfile
from runners.engine_state import EnginePhase, EngineState
from runners.errors import EngineUnavailableError, RateLimitError
from runners.messages import EngineStats, ModelInfo, StepsReport
from runners.request_metrics import RequestMetrics
from runners.telemetry.curves import Curves

MAX_WATCHERS = 32
MAX_BUFFERED_EVENTS = 64
"""About three seconds of steps."""
_INTERVAL_S = 1.0
_RETRY_S = 5.0

_encode = msgspec.json.Encoder().encode


class WatchedEngine(Protocol):
    """What the feed asks of `runners.engine_client.EngineClient`."""

    on_steps: Callable[[StepsReport], None]
    metrics: RequestMetrics

    @property
    def state(self) -> EngineState: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def models(self) -> Sequence[ModelInfo]: ...
    @property
    def restarts(self) -> int: ...
    def watch_steps(self, is_on: bool) -> None: ...


class Subscription:
    """One reader's events, as bytes of an event stream."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_BUFFERED_EVENTS)
        self._is_closed = False

    async def read(self) -> bytes | None:
        """Everything that has come since the last call, or the next to come; None: the stream has ended."""
        parts = [await self._events.get()]
        while parts[-1] is not None and not self._events.empty():
            parts.append(self._events.get_nowait())
        if parts[-1] is None and len(parts) > 1:
            self._events.put_nowait(None)
        return b"".join(part for part in parts if part is not None) or None

    def offer(self, event: bytes) -> None:
        """Buffer an event; a full buffer ends the stream."""
        if self._events.full():
            self.end()
        else:
            self._events.put_nowait(event)

    def end(self) -> None:
        """The reader gets what is buffered no more, only the end."""
        while not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(None)
        self.close()

    def close(self) -> None:
        """Nothing more is buffered. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._feed.leave(self)


class Feed:
    """Belongs to one asyncio loop. `run` must be running for events other than steps to come."""

    def __init__(self, engine: WatchedEngine, resolved: ResolvedProfile, version: str) -> None:
        self._engine = engine
        self._profile = {"name": resolved.name, "settings": [shown(setting) for setting in settings_of(resolved)]}
        self._version = version
        self._curves = Curves(engine.metrics)
        self._readers: set[Subscription] = set()
        self._seen: tuple[object, ...] = ()
        engine.on_steps = self._on_steps

    @property
    def num_watchers(self) -> int:
        return len(self._readers)

    def subscribe(self) -> Subscription:
        """A new reader; its first event is the opening. RateLimitError when there are too many, EngineUnavailableError
        while the server is shutting down."""
        if self._engine.state.phase is EnginePhase.DRAINING:
            raise EngineUnavailableError("The server is shutting down.")
        if len(self._readers) >= MAX_WATCHERS:
            raise RateLimitError(f"{MAX_WATCHERS} are watching already.", retry_after_s=_RETRY_S)
        subscription = Subscription(self)
        subscription.offer(self._opening())
        self._readers.add(subscription)
        if len(self._readers) == 1:
            self._engine.watch_steps(True)
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """Forget a reader; the last one turns the engine's reports off."""
        self._readers.discard(subscription)
        if not self._readers:
            self._engine.watch_steps(False)

    async def run(self) -> None:
        """Tick once a second, for ever."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.tick()

    def tick(self) -> None:
        """One more point; readers hear of it. A server that shuts down ends their streams: it waits for them."""
        engine = self._engine
        point = self._curves.sample(engine.stats, time.monotonic(), time.time())
        facts = engine.state.phase, [info.served_names for info in engine.models]
        if facts != self._seen:
            self._seen = facts
            self._broadcast(self._opening())
        second = {"state": self._state(), "stats": engine.stats, "point": point}
        self._broadcast(_event(b"second", second))
        if engine.state.phase is EnginePhase.DRAINING:
            for reader in list(self._readers):
                reader.end()

    def _on_steps(self, report: StepsReport) -> None:
        if self._readers:
            self._broadcast(_event(b"steps", report))

    def _broadcast(self, event: bytes) -> None:
        for reader in list(self._readers):
            reader.offer(event)

    def _opening(self) -> bytes:
        engine = self._engine
        opening = {
            "version": self._version,
            "state": self._state(),
            "stats": engine.stats,
            "models": [_model(info) for info in engine.models],
            "profile": self._profile,
            "points": list(self._curves.points),
        }
        return _event(b"opening", opening)

    def _state(self) -> dict[str, Any]:
        state = self._engine.state
        return {
            "phase": state.phase,
            "detail": state.detail,
            "fraction": state.fraction,
            "for_s": round(max(0.0, time.monotonic() - state.since), 1),
            "restarts": self._engine.restarts,
        }


def _event(name: bytes, data: Any) -> bytes:
    return b"event: " + name + b"\ndata: " + _encode(data) + b"\n\n"


def _model(info: ModelInfo) -> dict[str, Any]:
    facts = msgspec.structs.asdict(info)
    for name in ("path", "eos_token_ids"):
        del facts[name]
    return facts


def shown(setting: Setting) -> dict[str, str]:
    """A setting as the page shows it. Of keys nobody learns more than how many there are: neither names nor hashes."""
    value = msgspec.json.decode(setting.value)
    text = setting.value
    if setting.path.startswith("auth.") or setting.path == "fairness.key_weights":
        if isinstance(value, (list, dict)):
            text = f"{len(value)} set"
        elif isinstance(value, str):
            text = "set"
    return {"path": setting.path, "value": text, "origin": setting.origin, "meaning": " ".join(setting.meaning.split())}
