"""`bentoml serve` with limits on: keys, CORS, deadlines, the token queue, clients that do not read or send."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from configs.api_keys import hash_key
from tests.support.server import BentoServer, eventually
from tests.support.tiny_tokenizers import write_byte_level

KEY = "key-of-team"
ORIGIN = "https://chat.example.com"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BentoServer]:
    folder = tmp_path_factory.mktemp("limits")
    model = folder / "model"
    model.mkdir()
    write_byte_level(model)
    keys = folder / "keys.yaml"
    keys.write_text(json.dumps([{"name": "team", "sha256": hash_key(KEY)}]))
    env = {
        "WAVELANE_ENGINE__EXECUTOR": "simulated",
        "WAVELANE_MODELS__0__SOURCE": str(model),
        "WAVELANE_MODELS__0__SERVED_NAMES": "[tiny]",
        "WAVELANE_SIMULATED__VOCAB_SIZE": "256",
        "WAVELANE_SIMULATED__MAX_CONTEXT": "200000",
        "WAVELANE_KV__POOL": "{blocks: 40000}",
        "WAVELANE_SIMULATED__STEP_US": "500",
        "WAVELANE_AUTH__KEYS_FILE": str(keys),
        "WAVELANE_ADMISSION__MAX_QUEUED_TOKENS": "3000",
        "WAVELANE_LIMITS__REQUEST_DEADLINE_S": "4",
        "WAVELANE_HTTP__CORS": f"[{ORIGIN}]",
        "WAVELANE_HTTP__MAX_HEADER_BYTES": "4096",
        "WAVELANE_HTTP__BODY_TIMEOUT_S": "1",
        "WAVELANE_HTTP__SEND_TIMEOUT_S": "1",
    }
    with BentoServer(folder, env) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        server.wait_ready()
        yield server


def complete(server: BentoServer, **body: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True, **body}
    return server.http.post("/v1/completions", json=body)


def assert_nothing_is_held(server: BentoServer) -> None:
    def free() -> bool:
        stats = server.engine_stats()
        return bool(stats["running"] == stats["waiting"] == 0 and stats["free_blocks"] == stats["total_blocks"])

    eventually(free)
    eventually(lambda: server.metric("wavelane_streams_open") == 0)


def test_a_key_opens_the_api_and_probes_need_none(server: BentoServer) -> None:
    assert complete(server).status_code == 200
    with httpx.Client(base_url=server.url) as stranger:
        assert stranger.get("/v1/models").status_code == 401
        for path in ("/livez", "/readyz", "/health", "/metrics"):
            assert stranger.get(path).status_code == 200


def test_a_browser_page_of_an_allowed_origin(server: BentoServer) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    with httpx.Client(base_url=server.url) as browser:  # a preflight carries no key
        allowed = browser.options("/v1/chat/completions", headers={"origin": ORIGIN, **asks})
        refused = browser.options("/v1/chat/completions", headers={"origin": "https://evil.example", **asks})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    answer = server.http.get("/v1/models", headers={"origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_a_deadline_ends_a_request_wherever_it_is(server: BentoServer) -> None:
    started = time.monotonic()
    late = complete(server, max_tokens=100_000)
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "deadline_exceeded"
    assert time.monotonic() - started >= 4
    events = complete(server, max_tokens=100_000, stream=True).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert events[-2] == "data: [DONE]"
    assert_nothing_is_held(server)


def test_a_queue_full_of_tokens(server: BentoServer) -> None:
    assert complete(server, prompt=[1] * 5000).status_code == 200  # alone: taken, however long
    refused = complete(server, prompt=[[1] * 2000, [2] * 2000])
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "prompt tokens" in refused.json()["error"]["message"]
    assert_nothing_is_held(server)


def open_raw(server: BentoServer, head: str, body: bytes = b"") -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    start = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n{head}\r\n"
    connection.sendall(start.encode() + body)
    return connection


def test_a_client_that_does_not_read_is_dropped(server: BentoServer) -> None:
    """Before its deadline, and before so much has piled up that the engine gives up, its connection and KV are gone."""
    body = json.dumps(
        {"model": "tiny", "prompt": [1], "max_tokens": 100_000, "ignore_eos": True, "stream": True, "logprobs": 5}
    ).encode()
    with open_raw(server, f"Content-Length: {len(body)}\r\n", body):
        eventually(lambda: server.metric("wavelane_streams_open") == 1)
        started = time.monotonic()
        eventually(lambda: server.metric("wavelane_streams_open") == 0, 20)
        assert time.monotonic() - started < 3.5, "the deadline ended it, not the client's silence"
    assert_nothing_is_held(server)
    assert complete(server).status_code == 200


def test_a_body_that_stops_half_way(server: BentoServer) -> None:
    with open_raw(server, "Content-Length: 1000\r\n", b'{"model":') as connection:
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


def test_headers_over_the_limit(server: BentoServer) -> None:
    refused = server.http.get("/v1/models", headers={"x-much": "x" * 5000})
    assert refused.status_code == 431
    assert refused.json()["error"]["code"] == "headers_too_large"


def test_headers_without_an_end(server: BentoServer) -> None:
    """One header that goes on, and many of them: refused long before they are whole, and nothing of them is kept."""
    assert server.worker_pid is not None
    before = psutil.Process(server.worker_pid).memory_info().rss
    for head in (b"x-a: " + b"a" * 60_000, b"".join(b"x-%d: %s\r\n" % (n, b"a" * 60) for n in range(1000))):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")
            sent = 0
            with contextlib.suppress(OSError):  # it is closed as soon as the limit is passed
                while sent < 2000:
                    connection.sendall(head)
                    sent += 1
            assert sent < 2000, "120 MB of headers were taken"
    assert psutil.Process(server.worker_pid).memory_info().rss - before < 20 * 2**20
    assert complete(server).status_code == 200


def test_headers_that_stop_half_way(server: BentoServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: ")
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


def test_a_large_body_behind_a_small_head(server: BentoServer) -> None:
    """Also on a connection that has carried requests before."""
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        for _ in range(3):
            body = {"model": "tiny", "prompt": "a" * 50_000, "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 200


def test_one_line_a_request(server: BentoServer) -> None:
    body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 2, "ignore_eos": True}
    server.http.post("/v1/completions", json=body, headers={"x-request-id": "line-1"})
    (line,) = eventually(lambda: [line for line in server.log().splitlines() if "line-1" in line])
    logged = json.loads(line[line.index("{") : line.rindex("}") + 1])
    assert (logged["status"], logged["key"], logged["completion_tokens"]) == (200, "team", 2)
    assert "path=/v1/" not in server.log(), "BentoML's access log has a second line"


def test_a_compressed_bomb_stays_compressed(server: BentoServer) -> None:
    """Nothing here unpacks a body: 256 MB of zeros in 256 kB are refused as the bytes they are."""
    assert server.worker_pid is not None
    bomb = gzip.compress(bytes(1 << 28), compresslevel=9)
    before = psutil.Process(server.worker_pid).memory_info().rss
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    refused = server.http.post("/v1/completions", content=bomb, headers=headers)
    assert refused.status_code == 400
    assert psutil.Process(server.worker_pid).memory_info().rss - before < 20 * 2**20


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..%2f..%2fetc%2fpasswd", "tiny/../../x", "\x00"])
def test_a_model_name_is_never_a_path(server: BentoServer, name: str) -> None:
    refused = complete(server, model=name)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        path = name.replace("\x00", "%00")
        head = f"GET /v1/models/{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        connection.sendall(head.encode())
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 "))
    assert b"root:" not in answer
