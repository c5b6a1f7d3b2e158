"""Bytes that no client of good will sends, on raw sockets: refused or dropped, and nothing else suffers.

`WAVELANE_TEST_RAW_REQUESTS` says how many mutated requests are sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.server import BentoServer, eventually
from tests.support.tiny_tokenizers import write_byte_level

MUTATED = int(os.environ.get("WAVELANE_TEST_RAW_REQUESTS", "300"))
BODY = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY

NO_HTTP = [
    GET + b"no colon here\r\n\r\n",
    GET + b"x\x00y: z\r\n\r\n",
    GET + b"x: y\x00z\r\n\r\n",
    GET + b": nameless\r\n\r\n",
    GET + b"x y: z\r\n\r\n",
    b"GET /v1/mod\x00els HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models HTTP/9.9\r\nHost: x\r\n\r\n",
    b"\x00" * 1000 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"B@D /v1/models HTTP/1.1\r\n\r\n",
    POST + b"Content-Length: -1\r\n\r\n" + BODY,
    POST + b"Content-Length: 1e3\r\n\r\n" + BODY,
    POST + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    CHUNKED + b"zz\r\n",
    CHUNKED + b"-5\r\nhello\r\n",
    CHUNKED + b"FFFFFFFFFFFFFFFFFF\r\n",
    CHUNKED + b"5\r\nhelloX\r\n0\r\n\r\n",
    CHUNKED + b"5\nhello\n0\n\n",
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BentoServer]:
    folder = tmp_path_factory.mktemp("hostile")
    model: Path = folder / "model"
    model.mkdir()
    write_byte_level(model)
    env = {
        "WAVELANE_ENGINE__EXECUTOR": "simulated",
        "WAVELANE_MODELS__0__SOURCE": str(model),
        "WAVELANE_MODELS__0__SERVED_NAMES": "[tiny]",
        "WAVELANE_SIMULATED__VOCAB_SIZE": "256",
        "WAVELANE_SIMULATED__STEP_US": "500",
        "WAVELANE_HTTP__MAX_HEADER_BYTES": "8192",
        "WAVELANE_HTTP__BODY_TIMEOUT_S": "2",
    }
    with BentoServer(folder, env) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def server(shared: BentoServer) -> Iterator[BentoServer]:
    """The server, and what must hold after every test: the same process, in good health, holding nothing."""
    worker_pid, engine_pid = shared.worker_pid, shared.engine_pid
    assert worker_pid is not None
    before = psutil.Process(worker_pid).memory_info().rss
    yield shared
    assert shared.http.post("/v1/completions", content=BODY).status_code == 200
    assert (shared.worker_pid, shared.engine_pid) == (worker_pid, engine_pid)
    eventually(lambda: shared.metric("wavelane_streams_open") == 0)
    assert psutil.Process(worker_pid).memory_info().rss - before < 20 * 2**20
    assert "Traceback" not in shared.log()


def connect(server: BentoServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes. TimeoutError when it leaves the connection open."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            received += part
    return received


def answer(server: BentoServer, data: bytes) -> bytes:
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        return read_all(connection)


def statuses(received: bytes) -> list[int]:
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("number", range(len(NO_HTTP)))
def test_what_is_no_http_is_refused(server: BentoServer, number: int) -> None:
    found = statuses(answer(server, NO_HTTP[number]))
    assert found in ([], [400]), NO_HTTP[number]


@pytest.mark.parametrize("length", [0, 1, 5, 20, len(POST), len(WHOLE) - len(BODY) - 1, len(WHOLE) - 1])
def test_a_request_that_stops(server: BentoServer, length: int) -> None:
    """Its client closes, or says no more: then it is told so."""
    with connect(server) as connection:
        connection.sendall(WHOLE[:length])
    with connect(server) as connection:
        connection.sendall(WHOLE[:length])
        assert statuses(read_all(connection)) in ([], [408])


def test_more_headers_than_anyone_needs(server: BentoServer) -> None:
    lines = b"".join(b"x-%d: y\r\n" % number for number in range(100_000))
    assert statuses(answer(server, GET + lines + b"\r\n")) in ([], [431])


def test_a_path_longer_than_anyone_needs(server: BentoServer) -> None:
    assert statuses(answer(server, b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")) in ([], [431])


@pytest.mark.parametrize("path", ["/v1/%", "/v1/%zz", "/v1/%ff%fe", "/v1/\xff\xfe", "//v1//models", "/../v1/models"])
def test_paths_that_make_no_sense(server: BentoServer, path: str) -> None:
    request = b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode("latin-1")
    (status,) = statuses(answer(server, request))
    assert 400 <= status < 500


def test_no_line_of_the_log_is_a_clients(server: BentoServer) -> None:
    """Neither by a path with a line's end in it, nor by a header whose bytes are no text."""
    head = b"GET /%0a2026-01-01%20[ERROR]%20forged HTTP/1.1\r\nHost: x\r\nContent-Type: \xdf\r\n"
    assert statuses(answer(server, head + b"Connection: close\r\n\r\n")) == [404]
    (line,) = eventually(lambda: [line for line in server.log().splitlines() if "forged" in line])
    assert not line.startswith("2026-01-01")
    assert r"\n2026-01-01 [ERROR] forged" in line
    assert '"status":404' in line


@pytest.mark.parametrize("part", [b"x-trailer: %s\r\n" % (b"a" * 1000), b"a" * 1000], ids=["many", "one"])
def test_trailers_without_an_end(server: BentoServer, part: bytes) -> None:
    """Behind the last chunk there may be headers again; a parser that keeps them keeps no more than of a head."""
    start = CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\nx-first: "
    assert growth_bytes(server, start, part) < 20 * 2**20


def test_one_trailer_without_an_end_is_cut_off(server: BentoServer) -> None:
    with connect(server) as connection:
        connection.sendall(CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\nx-first: ")
        with pytest.raises(ConnectionError):
            connection_takes(connection, b"a" * 1000, 20_000)


def connection_takes(connection: socket.socket, part: bytes, times: int) -> None:
    """Send `part` so often. ConnectionError when the server has closed meanwhile."""
    for _ in range(times):
        connection.sendall(part)


def test_large_chunks_in_pieces_are_read(server: BentoServer) -> None:
    """A chunk's content may come long after its header, and be larger than any head."""
    body = BODY[:-1] + b" " * 300_000 + BODY[-1:]
    with connect(server) as connection:
        connection.sendall(CHUNKED + b"%x\r\n" % len(body))
        time.sleep(0.05)
        connection.sendall(body)
        connection.sendall(b"\r\n0\r\nx-trailer: y\r\n\r\n")
        assert statuses(read_all(connection))[:1] == [200]


def test_a_chunk_extension_without_an_end(server: BentoServer) -> None:
    assert growth_bytes(server, CHUNKED + b"5;", b"a" * 1000) < 20 * 2**20


def growth_bytes(server: BentoServer, start: bytes, part: bytes) -> int:
    """Resident memory that the HTTP process gains from `start` and 100,000 times `part`."""
    assert server.worker_pid is not None
    process = psutil.Process(server.worker_pid)
    before = process.memory_info().rss
    with connect(server) as connection, contextlib.suppress(ConnectionError, TimeoutError):
        connection.sendall(start)
        for _ in range(100_000):
            connection.sendall(part)
    return int(process.memory_info().rss - before)


def test_requests_in_one_piece_are_answered_in_order(server: BentoServer) -> None:
    paths = [b"/v1/models", b"/version", b"/v1/no/such/path", b"/health"] * 10
    data = b"".join(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in paths)
    found = statuses(answer(server, data + WHOLE))
    assert found == [200, 200, 404, 200] * 10 + [200]


def test_a_request_behind_a_stream_waits_for_its_end(server: BentoServer) -> None:
    body = json.dumps({"model": "tiny", "prompt": [1], "max_tokens": 50, "ignore_eos": True, "stream": True}).encode()
    received = answer(server, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body + WHOLE)
    assert statuses(received) == [200, 200]
    assert received.index(b"data: [DONE]") < received.index(b"HTTP/1.1 200", 1)


def test_many_clients_that_never_finish_their_head(server: BentoServer) -> None:
    """Slow loris: each sends a byte now and then. Others are served meanwhile; all of these are gone in the end."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(200)]
        for letter in WHOLE[:8]:
            for connection in slow:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(bytes([letter]))
            assert server.http.post("/v1/completions", content=BODY).status_code == 200
            time.sleep(0.1)
        for connection in slow:
            assert statuses(read_all(connection)) in ([], [408])


def test_requests_with_bytes_changed(server: BentoServer) -> None:
    """Whatever comes of them is an answer below 500, or the end of the connection."""
    rng = random.Random(7)
    whole_ones = [WHOLE, GET + b"Connection: close\r\n\r\n", CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"]
    for number in range(MUTATED):
        data = bytearray(rng.choice(whole_ones))
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[place] = rng.randrange(256)
                case 1:
                    del data[place : place + rng.randint(1, 20)]
                case 2:
                    data[place:place] = rng.randbytes(rng.randint(1, 20))
                case _:
                    data[place:place] = rng.choice((b"\r\n", b"\x00", b":", b"\r\n\r\n", b"Content-Length: 3\r\n"))
            if not data:
                data = bytearray(b"\x00")
        with connect(server) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            found = statuses(read_all(connection))
        assert all(status < 500 for status in found), (number, bytes(data), found)
