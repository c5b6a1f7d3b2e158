"""Who looks, what each gets, and that a reader who lags costs nobody anything."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest

from configs.loader import load_profile
from runners.engine_state import EnginePhase, EngineState
from runners.errors import EngineUnavailableError, RateLimitError
from runners.messages import EngineStats, ModelInfo, StepRecord, StepsReport
from runners.request_metrics import RequestMetrics
from runners.telemetry.feed import MAX_BUFFERED_EVENTS, MAX_WATCHERS, Feed, Subscription
from tests.support.scripted_engine import model_info

REPORT = StepsReport("m", 5.0, EngineStats(running=1), [], 2, [StepRecord(1, "decode", 4.0, 4.5, 2, 2, "3", [])])


class Engine:
    """What the feed sees of an engine client."""

    def __init__(self) -> None:
        self.state = EngineState(EnginePhase.READY)
        self.stats = EngineStats(free_blocks=5, total_blocks=9)
        self.models: list[ModelInfo] = [model_info()]
        self.metrics = RequestMetrics()
        self.restarts = 0
        self.watching: list[bool] = []
        self.on_steps = lambda report: None

    def watch_steps(self, is_on: bool) -> None:
        self.watching.append(is_on)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def feed(engine: Engine) -> Feed:
    return Feed(engine, load_profile("balanced", {"WAVELANE_WAVE__SUB_WAVE": "7"}), "1.2")


async def read(subscription: Subscription) -> list[tuple[str, Any]]:
    """Events that are there; those after the end are none."""
    data = await asyncio.wait_for(subscription.read(), 5)
    if data is None:
        return []
    events = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        name, body = event.split("\n")
        events.append((name.removeprefix("event: "), json.loads(body.removeprefix("data: "))))
    return events


async def test_the_opening_says_what_is_served_and_how(feed: Feed) -> None:
    feed.tick()
    ((name, opening),) = await read(feed.subscribe())
    assert name == "opening"
    assert opening["version"] == "1.2"
    assert opening["state"]["phase"] == "ready"
    assert opening["stats"]["total_blocks"] == 9
    assert [model["served_names"] for model in opening["models"]] == [["tiny"]]
    assert "path" not in opening["models"][0]
    assert len(opening["points"]) == 1
    settings = {setting["path"]: setting for setting in opening["profile"]["settings"]}
    assert settings["wave.sub_wave"]["value"] == "7"
    assert settings["wave.sub_wave"]["origin"] == "WAVELANE_WAVE__SUB_WAVE"
    assert settings["wave.sub_wave"]["meaning"]
    assert settings["engine.slots"]["origin"] == "default"


async def test_the_engine_is_asked_only_while_somebody_looks(feed: Feed, engine: Engine) -> None:
    assert engine.watching == []
    first, second = feed.subscribe(), feed.subscribe()
    assert engine.watching == [True]
    first.close()
    assert engine.watching == [True]
    second.close()
    second.close()
    assert engine.watching == [True, False]
    feed.subscribe()
    assert engine.watching == [True, False, True]


async def test_steps_and_seconds_reach_every_reader(feed: Feed, engine: Engine) -> None:
    feed.tick()
    readers = [feed.subscribe() for _ in range(3)]
    engine.on_steps(REPORT)
    feed.tick()
    for reader in readers:
        (_, (steps_name, steps), (second_name, second)) = await read(reader)
        assert (steps_name, second_name) == ("steps", "second")
        assert steps["steps"] == [[1, "decode", 4.0, 4.5, 2, 2, "3", []]]
        assert steps["stats"] == {"running": 1}
        assert second["state"]["phase"] == "ready"
        assert second["point"]["used_blocks"] == 4


async def test_a_new_model_or_phase_opens_again(feed: Feed, engine: Engine) -> None:
    feed.tick()
    reader = feed.subscribe()
    engine.state = EngineState(EnginePhase.RESTARTING, "the engine hung")
    feed.tick()
    engine.models = [model_info(name="other")]
    feed.tick()
    feed.tick()
    events = await read(reader)
    assert [name for name, _ in events] == ["opening", "opening", "second", "opening", "second", "second"]
    assert events[1][1]["state"]["detail"] == "the engine hung"
    assert events[3][1]["models"][0]["served_names"] == ["other"]


async def test_a_reader_that_lags_is_dropped_and_the_others_are_not(feed: Feed, engine: Engine) -> None:
    slow, quick = feed.subscribe(), feed.subscribe()
    for _ in range(MAX_BUFFERED_EVENTS + 5):
        engine.on_steps(REPORT)
        await read(quick)
    assert await slow.read() is None
    assert feed.num_watchers == 1
    assert engine.watching == [True]


async def test_readers_are_bounded(feed: Feed) -> None:
    readers = [feed.subscribe() for _ in range(MAX_WATCHERS)]
    with pytest.raises(RateLimitError):
        feed.subscribe()
    readers[0].close()
    feed.subscribe()


async def test_a_server_that_shuts_down_ends_the_streams(feed: Feed, engine: Engine) -> None:
    reader = feed.subscribe()
    engine.state = EngineState(EnginePhase.DRAINING)
    feed.tick()
    assert await reader.read() is None
    assert engine.watching == [True, False]
    with pytest.raises(EngineUnavailableError):
        feed.subscribe()


async def test_nothing_of_a_key_is_shown(engine: Engine) -> None:
    digest = hashlib.sha256(b"wl-secret").hexdigest()
    env = {
        "WAVELANE_AUTH__KEYS": json.dumps([{"name": "alice", "sha256": digest, "admin": True}]),
        "WAVELANE_AUTH__KEYS_FILE": "/run/secrets/keys.yaml",
        "WAVELANE_AUTH__REQUESTS_PER_MINUTE": "30",
        "WAVELANE_FAIRNESS__KEY_WEIGHTS": "{alice: 2.0}",
    }
    subscription = Feed(engine, load_profile("balanced", env), "1").subscribe()
    data = await subscription.read()
    assert data is not None
    for secret in (b"alice", digest.encode(), b"secrets"):
        assert secret not in data
    settings = {s["path"]: s["value"] for s in json.loads(data.split(b"data: ")[1])["profile"]["settings"]}
    assert settings["auth.keys"] == settings["fairness.key_weights"] == "1 set"
    assert settings["auth.keys_file"] == "set"
    assert settings["auth.requests_per_minute"] == "30"
