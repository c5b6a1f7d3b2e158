"""Endpoints answer whatever happens: sizes, crashes, phases of the engine, clients that are gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from runners.api.app import create_app
from runners.api.settings import ApiSettings
from runners.errors import EngineUnavailableError, RateLimitError
from tests.support.scripted_engine import Reply, ScriptedEngine, State

SETTINGS = ApiSettings(max_body_bytes=1000, version="9.9.9")


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(Reply([7, 8, 9]))


@pytest.fixture
def client(engine: ScriptedEngine) -> Iterator[TestClient]:
    with TestClient(create_app(SETTINGS, engine)) as client:
        yield client


def test_everything_answers_before_the_engine_is_there() -> None:
    client = TestClient(create_app(SETTINGS))
    assert client.get("/livez").status_code == 200
    assert client.get("/version").json() == {"version": "9.9.9"}
    for path in ("/readyz", "/health", "/v1/models"):
        assert client.get(path).status_code == 503
    response = client.post("/v1/completions", json={"prompt": [5]})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert int(response.headers["retry-after"]) >= 1


def test_engine_and_text_may_be_set_later(engine: ScriptedEngine) -> None:
    app = create_app(SETTINGS)
    app.state.engine = engine
    response = TestClient(app).post("/v1/completions", json={"prompt": [5], "max_tokens": 1, "return_token_ids": True})
    assert response.json()["choices"][0]["token_ids"] == [7]


@pytest.mark.parametrize("phase", ["starting", "loading", "restarting", "draining", "failed"])
def test_health_tells_phase_and_progress(client: TestClient, engine: ScriptedEngine, phase: str) -> None:
    engine.state = State(phase, "layer 3 of 30", 0.1)
    health = client.get("/health")
    assert health.status_code == 503
    assert {
        "status": phase,
        "ready": False,
        "detail": "layer 3 of 30",
        "progress": 0.1,
    }.items() <= health.json().items()
    assert client.get("/readyz").status_code == 503
    assert client.get("/livez").status_code == 200
    refused = client.post("/v1/completions", json={"prompt": [5]})
    assert refused.status_code == 503
    assert phase in refused.json()["error"]["message"]


def test_a_server_that_drains_closes_each_connection_behind_its_answer(
    client: TestClient, engine: ScriptedEngine
) -> None:
    """Else a client's next request goes to a connection that is about to be closed."""
    assert "connection" not in client.get("/v1/models").headers
    engine.state = State("draining")
    assert client.get("/v1/models").headers["connection"] == "close"


def test_health_when_ready(client: TestClient) -> None:
    health = client.get("/health")
    assert (health.status_code, health.json()["status"], health.json()["models"]) == (200, "ok", ["tiny"])
    assert health.json()["engine"]["waiting"] == 0
    assert client.get("/readyz").status_code == 200


def test_models_carry_facts(client: TestClient, engine: ScriptedEngine) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0] == client.get("/v1/models/tiny").json()
    assert listed["data"][0]["max_model_len"] == engine.models[0].max_context
    engine.models[0].served_names[:] = ["org/tiny", "alias"]
    assert client.get("/v1/models/org/tiny").json()["id"] == "org/tiny"
    assert client.post("/v1/completions", json={"model": "alias", "prompt": [5]}).json()["model"] == "alias"
    assert client.post("/v1/completions", json={"prompt": [5]}).json()["model"] == "org/tiny"


def _chunks(size: int) -> Iterator[bytes]:
    for _ in range(size // 100):
        yield b" " * 100


@pytest.mark.parametrize("content", [b" " * 1001, _chunks(2000)])
def test_body_over_the_limit(client: TestClient, content: Any) -> None:
    response = client.post("/v1/completions", content=content)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"


def test_a_crash_is_a_500_in_our_shape(client: TestClient, engine: ScriptedEngine) -> None:
    def crash(ids: list[int], params: object) -> Reply:
        raise ZeroDivisionError("a secret")

    engine.reply = crash
    for stream in (False, True):
        response = client.post("/v1/completions", json={"prompt": [5], "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text


def test_a_crash_after_the_start_ends_the_stream_in_our_shape(client: TestClient, engine: ScriptedEngine) -> None:
    engine.reply = Reply([5], error=ZeroDivisionError("a secret"))
    response = client.post("/v1/completions", json={"prompt": [5], "stream": True})
    assert response.status_code == 200
    assert '"code":"internal_error"' in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    assert "secret" not in response.text


def test_refused_by_the_engine(client: TestClient, engine: ScriptedEngine) -> None:
    engine.submit_error = RateLimitError("full", retry_after_s=2.5)
    response = client.post("/v1/completions", json={"prompt": [5], "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    engine.submit_error = EngineUnavailableError("draining")
    assert client.post("/v1/completions", json={"prompt": [5]}).status_code == 503


def test_a_refusal_midway_takes_the_earlier_choices_back(client: TestClient, engine: ScriptedEngine) -> None:
    engine.submit_error, engine.refuse_after = RateLimitError("full"), 2
    response = client.post("/v1/completions", json={"prompt": [[5], [6], [7]]})
    assert response.status_code == 429
    assert [submission.is_aborted for submission in engine.submissions] == [True, True]


async def test_client_gone_while_it_sends_its_body(engine: ScriptedEngine) -> None:
    app = create_app(SETTINGS, engine)
    messages: list[dict[str, Any]] = []
    events = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return events.pop(0)

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "root_path": ""}
    await app(scope, receive, send)
    assert messages[0]["status"] == 499
    assert not engine.submissions


async def test_cancelled_from_outside(engine: ScriptedEngine) -> None:
    """A timeout layer or a shutdown above us cancels the endpoint: the engine's side is freed."""
    engine.reply = Reply([5], gate=asyncio.Event())
    body = [{"type": "http.request", "body": b'{"prompt": [5]}', "more_body": False}]

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "root_path": ""}
    task = asyncio.ensure_future(create_app(SETTINGS, engine)(scope, receive, send))
    await engine.submitted.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.submissions[0].is_aborted


def test_head_and_unknown_methods(client: TestClient) -> None:
    assert client.head("/health").status_code == 200
    assert client.request("PURGE", "/v1/nothing").status_code == 404
    assert client.request("PURGE", "/v1/completions").status_code == 405
    assert client.get("/nothing").json()["error"]["code"] == "unknown_path"


def test_mounted_under_bentoml(engine: ScriptedEngine) -> None:
    """BentoML adds its own routes after our mount; they must stay reachable, and our refusals ours."""
    mount = pytest.importorskip("_bentoml_impl.server.mount")
    outer = Starlette(
        routes=[
            Route("/livez", lambda request: PlainTextResponse("bento")),
            mount.PassiveMount("/", create_app(replace(SETTINGS, page=False), engine), name="api"),
            Route("/", lambda request: PlainTextResponse("index")),
            Route("/docs.json", lambda request: PlainTextResponse("docs")),
        ]
    )
    client = TestClient(outer)
    assert client.get("/").text == "index"
    assert client.get("/docs.json").text == "docs"
    assert client.get("/livez").text == "bento"
    assert client.get("/nothing").text == "Not Found"
    assert client.get("/v1/nothing").json()["error"]["code"] == "unknown_path"
    assert client.get("/v1/completions").status_code == 405
    assert client.post("/v1/completions", json={"prompt": [5]}).status_code == 200


def test_limits_of_the_profile(engine: ScriptedEngine) -> None:
    settings = replace(SETTINGS, max_tokens=50, default_max_tokens=2, request_deadline_s=7.0)
    client = TestClient(create_app(settings, engine))
    refused = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 51})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert client.post("/v1/completions", json={"prompt": [5]}).json()["usage"]["completion_tokens"] == 2
    assert engine.submissions[0].deadline_s == 7.0


def logged(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = [record for record in caplog.records if record.name == "runners.requests"]
    line: dict[str, Any] = json.loads(record.getMessage())
    return line


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_leaves_one_line_without_its_text(
    engine: ScriptedEngine, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    client = TestClient(create_app(replace(SETTINGS, request_log=True), engine))
    body = {"prompt": [5, 6], "max_tokens": 3, "user": "somebody", "stream": stream}
    with caplog.at_level("INFO", logger="runners.requests"):
        response = client.post("/v1/completions", json=body, headers={"x-request-id": "abc-1"})
        client.get("/livez")
    line = logged(caplog)
    assert response.status_code == 200
    assert line.pop("duration_s") > 0
    assert line.pop("id").startswith("cmpl-")
    assert line == {
        "request_id": "abc-1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "key": "",
        "model": "tiny",
        "stream": stream,
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "completion_tokens": 3,
        "finish_reasons": ["length"],
    }


def test_a_refused_request_leaves_its_error_code(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    client = TestClient(create_app(replace(SETTINGS, request_log=True), engine))
    with caplog.at_level("INFO", logger="runners.requests"):
        client.post("/v1/completions", json={"prompt": "some secret text", "max_tokens": "many"})
    line = logged(caplog)
    assert (line["status"], line["error"]) == (400, "invalid_request_error")
    assert "secret" not in json.dumps(line)


def test_a_stream_that_fails_leaves_the_error_too(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.reply = Reply([7], error=EngineUnavailableError("gone"))
    client = TestClient(create_app(replace(SETTINGS, request_log=True), engine))
    with caplog.at_level("INFO", logger="runners.requests"):
        client.post("/v1/completions", json={"prompt": [5], "max_tokens": 3, "stream": True})
    line = logged(caplog)
    assert (line["status"], line["error"]) == (200, "engine_unavailable")
