"""Requests by route: what is counted, under which labels, and that strangers cannot make more of them."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from runners.engine_client import EngineClient
from runners.http_metrics import ROUTE_KEY, CountRequests, HttpMetrics
from runners.metrics import render


def samples(metrics: HttpMetrics) -> dict[str, float]:
    """By name and values of the labels."""
    client = EngineClient(slots=1, max_queued_requests=1, beat_limit_s=1.0)
    return {
        ":".join((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(render(client, metrics))
        for sample in family.samples
        if "_http_request" in sample.name
    }


async def ask(layer: CountRequests, path: str, method: str = "GET") -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    await layer({"type": "http", "path": path, "method": method}, receive, send)


def app_of(status: int, *, route: str | None = None, error: Exception | None = None) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if route is not None:
            scope[ROUTE_KEY] = route
        if error is not None:
            raise error
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


async def test_a_request_of_a_route() -> None:
    metrics = HttpMetrics()
    metrics.ended("/v1/models/{model_id:path}", "GET", 200, 0.25)
    layer = CountRequests(app_of(404, route="/v1/models/{model_id:path}"), metrics, [])
    await ask(layer, "/v1/models/a")
    await ask(layer, "/v1/models/b")
    found = samples(metrics)
    assert found["wavelane_http_requests_total:/v1/models/{model_id:path}:GET:404"] == 2
    assert found["wavelane_http_requests_total:/v1/models/{model_id:path}:GET:200"] == 1
    name = "wavelane_http_request_duration_seconds"
    assert found[f"{name}_count:/v1/models/{{model_id:path}}:GET"] == 3
    assert found[f"{name}_sum:/v1/models/{{model_id:path}}:GET"] >= 0.25
    assert found["wavelane_http_requests_in_progress"] == 0


async def test_paths_and_methods_that_anyone_may_invent_make_no_labels() -> None:
    metrics = HttpMetrics()
    layer = CountRequests(app_of(404), metrics, ["/generate"])
    for number in range(1000):
        await ask(layer, f"/admin/{number}.php", f"M{number}")
    await ask(layer, "/generate", "POST")
    found = {name: value for name, value in samples(metrics).items() if "_total" in name}
    assert found == {
        "wavelane_http_requests_total:other:other:404": 1000,
        "wavelane_http_requests_total:/generate:POST:404": 1,
    }


async def test_a_handler_that_raises_counts_as_500_and_ends() -> None:
    metrics = HttpMetrics()
    with pytest.raises(ValueError, match="x"):
        await ask(CountRequests(app_of(200, error=ValueError("x")), metrics, ["/"]), "/")
    assert samples(metrics)["wavelane_http_requests_total:/:GET:500"] == 1
    assert metrics.in_progress == 0


async def test_what_is_no_http_request_passes_by() -> None:
    metrics = HttpMetrics()
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    await CountRequests(app, metrics, [])({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]
    assert not [name for name in samples(metrics) if "_total" in name]
