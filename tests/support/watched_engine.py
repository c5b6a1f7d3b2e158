"""A scripted engine with what the page's feed asks for beside the API."""

from __future__ import annotations

from configs.loader import ResolvedProfile
from runners.request_metrics import RequestMetrics
from runners.telemetry.feed import Feed
from tests.support.scripted_engine import ScriptedEngine


def watched(engine: ScriptedEngine, resolved: ResolvedProfile) -> Feed:
    """A feed of this engine; `engine.feed` is it."""
    engine.metrics = RequestMetrics()
    engine.restarts = 0
    engine.watch_steps = lambda is_on: None
    engine.feed = Feed(engine, resolved, "test")
    return engine.feed
