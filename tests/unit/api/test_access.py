"""API keys at the HTTP layer: who gets in, how often, how many at once, and what everyone else is told."""

from __future__ import annotations

import asyncio
import hmac
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from configs.api_keys import hash_key
from configs.operation import ApiKeySection
from runners.api.access import Access
from runners.api.app import create_app
from runners.api.models import Models
from runners.api.settings import ApiSettings
from runners.errors import AuthenticationError, PermissionDeniedError, RateLimitError
from tests.support.scripted_engine import Reply, ScriptedEngine


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def key(name: str, **fields: Any) -> ApiKeySection:
    return ApiKeySection(name=name, sha256=hash_key(f"key-of-{name}"), **fields)


def headers(name: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer key-of-{name}".encode())]


def enter(access: Access, name: str) -> None:
    with access.request(headers(name), needs_admin=False):
        pass


def test_every_hash_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first match nor the first difference ends the search."""
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, given)

    access = Access([key(name) for name in "abc"])
    monkeypatch.setattr("runners.api.access.hmac", SimpleNamespace(compare_digest=compare))
    for name in ("a", "c"):
        compared.clear()
        with access.request(headers(name), needs_admin=False) as caller:
            assert caller is not None
            assert caller.name == name
        assert len(compared) == 3


@pytest.mark.parametrize(
    "value", [b"", b"Bearer", b"Bearer ", b"Bearer key-of-b", b"Basic key-of-a", b"key-of-a", b"Bearer " + b"a" * 9999]
)
def test_wrong_keys(value: bytes) -> None:
    access = Access([key("a")])
    with pytest.raises(AuthenticationError), access.request([(b"authorization", value)], needs_admin=False):
        pass


def test_a_rate_is_a_bucket_that_fills_steadily() -> None:
    clock = Clock()
    access = Access([key("a", requests_per_minute=3), key("b", requests_per_minute=3)], clock)
    for _ in range(3):
        enter(access, "a")
    with pytest.raises(RateLimitError) as refused:
        enter(access, "a")
    assert refused.value.retry_after_s == pytest.approx(20)
    enter(access, "b")  # a key of its own, a bucket of its own
    clock.now += 19.9
    with pytest.raises(RateLimitError):
        enter(access, "a")
    clock.now += 0.2
    enter(access, "a")
    clock.now += 3600
    for _ in range(3):  # an hour of silence saves up no more than a minute's worth
        enter(access, "a")
    with pytest.raises(RateLimitError):
        enter(access, "a")


def test_concurrency_is_given_back_also_after_an_error() -> None:
    access = Access([key("a", max_concurrency=1)])

    def fail_while_in_flight() -> None:
        with access.request(headers("a"), needs_admin=False):
            with pytest.raises(RateLimitError) as refused:
                enter(access, "a")
            assert refused.value.code == "concurrency_limit_exceeded"
            raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fail_while_in_flight()


def test_a_refusal_for_concurrency_costs_no_rate() -> None:
    access = Access([key("a", max_concurrency=1, requests_per_minute=2)], Clock())
    with access.request(headers("a"), needs_admin=False), pytest.raises(RateLimitError):
        enter(access, "a")
    enter(access, "a")


@pytest.mark.parametrize(("keys", "name"), [([], "a"), ([key("a")], "a")])
def test_admin_rights_come_only_from_an_admin_key(keys: list[ApiKeySection], name: str) -> None:
    with pytest.raises(PermissionDeniedError), Access(keys).request(headers(name), needs_admin=True):
        pass
    with Access([*keys, key("root", admin=True)]).request(headers("root"), needs_admin=True) as caller:
        assert caller is not None


# --- over HTTP -----------------------------------------------------------------------------------------------------

BODY = {"prompt": [5], "max_tokens": 3}
KEYS = (key("a", max_concurrency=1), key("slow", requests_per_minute=1), key("root", admin=True))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(Reply([7, 8, 9]))


@pytest.fixture
def app(engine: ScriptedEngine) -> Starlette:
    return create_app(ApiSettings(keys=KEYS, max_header_bytes=2000, body_timeout_s=0.05), engine)


def connect(app: Starlette, name: str | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),
        base_url="http://test",
        headers={} if name is None else {"authorization": f"Bearer key-of-{name}"},
    )


async def test_without_a_key(app: Starlette, engine: ScriptedEngine) -> None:
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/nothing", "/tokenize", "/detokenize")
    async with connect(app) as client:
        for path in paths:
            response = await client.post(path, content=b"not even JSON")
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.json()["error"]["code"] == "invalid_api_key"
        for path in ("/livez", "/readyz", "/health", "/version"):
            assert (await client.get(path)).status_code == 200
    assert engine.submissions == []


async def test_with_a_key(app: Starlette) -> None:
    async with connect(app, "a") as client:
        for _ in range(3):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    async with connect(app, "unknown") as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 401


async def test_a_key_may_be_trusted_with_urgent_requests(engine: ScriptedEngine) -> None:
    keys = (key("chat"), key("operator", most_urgent_priority=-10))
    app = create_app(ApiSettings(keys=keys, most_urgent_priority=-1), engine)
    for name in ("chat", "operator"):
        async with connect(app, name) as client:
            for priority in (-50, -5, 2):
                assert (await client.post("/v1/completions", json={**BODY, "priority": priority})).status_code == 200
    assert [submission.priority for submission in engine.submissions] == [-1, -1, 2, -10, -5, 2]


async def test_a_rate_limit_says_when_to_come_back(app: Starlette) -> None:
    async with connect(app, "slow") as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        refused = await client.post("/v1/completions", json=BODY)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["type"] == "rate_limit_error"


async def test_a_stream_counts_until_its_end(app: Starlette, engine: ScriptedEngine) -> None:
    gate = asyncio.Event()
    engine.reply = Reply([7], gate=gate)
    async with connect(app, "a") as client:
        first = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": True}))
        await engine.submitted.wait()
        refused = await client.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        gate.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_what_needs_an_admin(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Models, "needs_admin", True)
    async with connect(app, "a") as client:
        refused = await client.get("/v1/models")
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_key_required"
    async with connect(app, "root") as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_headers_over_the_limit(app: Starlette) -> None:
    async with connect(app, "a") as client:
        refused = await client.post("/v1/completions", json=BODY, headers={"x-much": "x" * 2000})
        assert refused.status_code == 431
        assert refused.headers["connection"] == "close"
        assert refused.json()["error"]["code"] == "headers_too_large"
        assert (await client.post("/v1/completions", json=BODY, headers={"x-much": "x" * 1000})).status_code == 200


async def test_a_body_that_does_not_arrive(app: Starlette) -> None:
    async def trickle() -> Any:
        yield b"{"
        await asyncio.sleep(5)

    async with connect(app, "a") as client:
        refused = await client.post("/v1/completions", content=trickle())
    assert refused.status_code == 408
    assert refused.headers["connection"] == "close"
    assert refused.json()["error"]["code"] == "request_timeout"
