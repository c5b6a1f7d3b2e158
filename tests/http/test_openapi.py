"""The OpenAPI document against what the server does: thousands of generated requests, none of which may break it.

`WAVELANE_TEST_API_REQUESTS` says how many (500 unless set).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from runners.api.openapi import openapi_document
from runners.request import SamplingParams
from tests.support.http_server import Server, scripted_app
from tests.support.live_server import LiveServer, live_server
from tests.support.scripted_engine import Reply
from tests.support.tiny_tokenizers import EOS

NUM_REQUESTS = int(os.environ.get("WAVELANE_TEST_API_REQUESTS", "500"))
NUM_POSTS = 6
ERROR_FIELDS = {"message", "type", "param", "code"}
OPERATIONS = [(method, path) for path, methods in openapi_document("test")["paths"].items() for method in methods]


def speaks(ids: list[int], params: SamplingParams) -> Reply:
    """A few bytes, some of them broken characters; calls and thoughts too."""
    texts = [b"fine", b"\xe2\x82", b'{"name": "f", "arguments": {}}', b"<think>hm</think>yes", b""]
    return Reply([*texts[params.seed % len(texts)], EOS])


@pytest.fixture(scope="module")
def live(byte_level_folder: Path) -> Iterator[LiveServer]:
    app, engine = scripted_app(byte_level_folder, eos_token_ids=[EOS])
    engine.reply = speaks
    with live_server(app, engine) as server:
        yield server


@pytest.fixture(scope="module")
def schema(live: LiveServer) -> Any:
    return schemathesis.openapi.from_url(f"{live.url}/openapi.json")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_generated_requests(schema: Any, method: str, path: str) -> None:
    """No 5xx, no answer that the document does not describe, every error in our shape, none that takes long."""
    modes = schemathesis.GenerationMode
    for mode in (modes.POSITIVE, modes.NEGATIVE) if method == "post" else (modes.POSITIVE,):
        strategy = schema[path][method].as_strategy(generation_mode=mode)
        share = NUM_REQUESTS // (2 * NUM_POSTS) if method == "post" else 5

        @hypothesis.given(case=strategy)
        @hypothesis.settings(
            max_examples=share,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def send(case: Any) -> None:
            response = case.call(timeout=20)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert set(response.json()["error"]) == ERROR_FIELDS
                assert len(response.content) < 4096
            case.validate_response(
                response, checks=(content_type_conformance, response_schema_conformance, status_code_conformance)
            )

        send()


def test_the_document_is_valid(schema: Any) -> None:
    schema.validate()
    assert len(OPERATIONS) == sum(1 for _ in schema.get_all_operations())
    assert sum(1 for method, _ in OPERATIONS if method == "post") == NUM_POSTS


async def test_the_documents_routes_are_the_servers(server: Server) -> None:
    document = (await server.client.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method in ("get", "post", "delete"):
            response = await server.client.request(method, path.replace("{", "").replace("}", ""), json={})
            assert (response.status_code == 405) == (method not in methods), (method, path)
    page = await server.client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert all(path in page.text for path in document["paths"])
    assert "http" not in page.text.replace("openapi.json", "")
