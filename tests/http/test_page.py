"""The dashboard over HTTP: its files, its event stream, and who may see what."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.loader import load_profile
from configs.operation import ApiKeySection
from runners.api.app import create_app
from runners.api.page import _FOLDER
from runners.api.settings import ApiSettings
from tests.support.live_server import LiveServer, live_server
from tests.support.scripted_engine import ScriptedEngine
from tests.support.server import BentoServer
from tests.support.tiny_tokenizers import write_byte_level
from tests.support.watched_engine import watched

KEY = "wl-page-test"
KEYS = [ApiKeySection(name="p", sha256=hashlib.sha256(KEY.encode()).hexdigest(), max_concurrency=1)]


def serve(settings: ApiSettings) -> Iterator[LiveServer]:
    engine = ScriptedEngine()
    app = create_app(settings, engine)
    app.state.feed = watched(engine, load_profile("balanced", {}))
    with live_server(app, engine) as server:
        yield server


@pytest.fixture
def open_page() -> Iterator[LiveServer]:
    yield from serve(ApiSettings())


@pytest.fixture
def locked_page() -> Iterator[LiveServer]:
    yield from serve(ApiSettings(keys=KEYS))


def next_event(lines: Iterator[str]) -> tuple[str, dict[str, Any]]:
    return next(lines).removeprefix("event: "), json.loads(next(lines).removeprefix("data: "))


def test_every_file_is_served_and_asks_for_nothing_from_elsewhere(open_page: LiveServer) -> None:
    names = [path.name for path in _FOLDER.iterdir()]
    for path in ["/", *(f"/page/{name}" for name in names)]:
        response = httpx.get(open_page.url + path)
        assert response.status_code == 200, path
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        again = httpx.get(open_page.url + path, headers={"if-none-match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        elsewhere = set(re.findall(r"""https?://[^\s"'`)<]+""", response.text))
        assert elsewhere <= {"http://www.w3.org/2000/svg"}, path
    assert httpx.get(f"{open_page.url}/").text == (_FOLDER / "index.html").read_text()


@pytest.mark.parametrize("name", ["missing.js", "..%2Fpage.py", "%2e%2e/page.py", "index.html%00"])
def test_nothing_else_is_served(open_page: LiveServer, name: str) -> None:
    assert httpx.get(f"{open_page.url}/page/{name}").status_code == 404


def test_the_stream_opens_and_ends_with_its_reader(open_page: LiveServer) -> None:
    feed = open_page.engine.feed
    with httpx.stream("GET", f"{open_page.url}/telemetry", timeout=10) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = response.iter_lines()
        name, opening = next_event(lines)
        assert (name, opening["models"][0]["served_names"]) == ("opening", ["tiny"])
        assert feed.num_watchers == 1
    open_page.wait_until(lambda: feed.num_watchers == 0)


def test_other_methods_are_refused(open_page: LiveServer) -> None:
    for path in ("/", "/page/index.html", "/telemetry"):
        assert httpx.post(open_page.url + path).status_code == 405


def test_with_keys_the_files_are_open_and_the_stream_is_not(locked_page: LiveServer) -> None:
    url = locked_page.url
    assert httpx.get(f"{url}/").status_code == 200
    assert httpx.get(f"{url}/telemetry").status_code == 401
    assert httpx.get(f"{url}/telemetry", headers={"Authorization": "Bearer wrong"}).status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("GET", f"{url}/telemetry", headers=headers, timeout=10) as response:
        lines = response.iter_lines()
        assert next_event(lines)[0] == "opening"
        # The page that is open does not take the one request that this key may have in flight.
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


def test_without_the_page_there_is_neither() -> None:
    for server in serve(ApiSettings(page=False)):
        for path in ("/", "/page/index.html", "/telemetry"):
            assert httpx.get(server.url + path).status_code == 404


def test_bentoml_serves_it_and_an_open_page_does_not_delay_the_end(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    env = {"WAVELANE_ENGINE__EXECUTOR": "simulated", "WAVELANE_MODELS__0__SOURCE": str(tmp_path)}
    with BentoServer(tmp_path, env) as server:
        server.wait_ready()
        assert server.http.get("/").text == (_FOLDER / "index.html").read_text()
        with server.http.stream("GET", "/telemetry") as response:
            lines = response.iter_lines()
            assert next_event(lines)[0] == "opening"
            body = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True}
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
            names = set()
            while not {"second", "steps"} <= names:
                names.add(next(lines).removeprefix("event: "))
            server.send(signal.SIGTERM)
            for _ in lines:
                pass
        server.wait_exit(30)


def test_before_the_start_the_stream_is_unavailable() -> None:
    engine = ScriptedEngine()
    with live_server(create_app(ApiSettings(), engine), engine) as server:
        assert httpx.get(f"{server.url}/telemetry").status_code == 503
