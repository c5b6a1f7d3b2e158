"""`bentoml serve` under signals: who dies, who notices, what clients see, and that nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from runners.execution.simulated import simulated_token
from tests.support.server import BentoServer, eventually
from tests.support.tiny_tokenizers import write_byte_level

RED_LIMIT_S = 5.0
MODEL = "tiny"
VOCAB_SIZE = 256
SIMULATED = {
    "WAVELANE_ENGINE__EXECUTOR": "simulated",
    "WAVELANE_MODELS__0__SERVED_NAMES": f"[{MODEL}]",
    "WAVELANE_SIMULATED__VOCAB_SIZE": str(VOCAB_SIZE),
    "WAVELANE_SIMULATED__STEP_US": "10000",
}


def start(folder: Path, **env: str) -> BentoServer:
    model = folder / "model"
    model.mkdir()
    write_byte_level(model)
    return BentoServer(folder, {**SIMULATED, "WAVELANE_MODELS__0__SOURCE": str(model), **env})


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BentoServer]:
    """A server that survives what its tests do to its engine."""
    with start(tmp_path_factory.mktemp("server")) as server:
        server.wait_ready()
        yield server
        server.close()
        assert server.processes() == []


@pytest.fixture
def server(shared: BentoServer) -> BentoServer:
    shared.wait_ready()
    return shared


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[BentoServer]:
    """A server for one test, which may end it."""
    with start(tmp_path) as server:
        server.wait_ready()
        yield server


class Stream(threading.Thread):
    """A streamed completion read on its own thread: `events` as they come, `error` when the connection breaks."""

    def __init__(self, server: BentoServer, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.events: list[dict[str, Any]] = []
        self.is_done = False
        self.error: Exception | None = None
        self._url = server.url
        self._body = {
            "model": MODEL,
            "prompt": [1, 2, 3],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.is_done = True
                    elif line.startswith("data: "):
                        self.events.append(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.error = error

    def wait_begun(self) -> Stream:
        eventually(lambda: self.events, 20)
        return self

    def wait_ended(self, limit_s: float = 30.0) -> Stream:
        self.join(limit_s)
        assert not self.is_alive(), "the stream hangs"
        return self

    @property
    def finish_reason(self) -> str | None:
        choices = self.events[-1].get("choices") if self.events else None
        return choices[0]["finish_reason"] if choices else None


def complete(server: BentoServer, max_tokens: int = 3) -> httpx.Response:
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True}
    return server.http.post("/v1/completions", json=body)


def assert_all_blocks_free(server: BentoServer) -> None:
    def free() -> bool:
        stats = server.engine_stats()
        return bool(stats["running"] == stats["waiting"] == 0 and stats["free_blocks"] == stats["total_blocks"])

    eventually(free)


def assert_ended_with_an_error(stream: Stream) -> None:
    stream.wait_ended()
    assert stream.error is None, "the connection broke instead of ending with an error event"
    assert stream.is_done
    error = stream.events[-1]["error"]
    assert error["type"] == "service_unavailable"
    assert error["code"] == "engine_unavailable"


# --- the engine ----------------------------------------------------------------------------------------------------


def test_sigkill_of_the_engine(server: BentoServer) -> None:
    engine_pid = server.engine_pid
    assert engine_pid is not None
    streams = [Stream(server, 5000).wait_begun() for _ in range(4)]
    blocking: list[httpx.Response] = []
    waiter = threading.Thread(target=lambda: blocking.append(complete(server, 5000)))
    waiter.start()
    eventually(lambda: server.engine_stats()["running"] == 5)
    os.kill(engine_pid, signal.SIGKILL)
    eventually(lambda: server.status("/readyz") == 503, RED_LIMIT_S, 0.005)
    assert server.status("/livez") == 200
    for stream in streams:
        assert_ended_with_an_error(stream)
    waiter.join(RED_LIMIT_S)
    assert blocking[0].status_code == 503
    assert blocking[0].json()["error"]["code"] == "engine_unavailable"
    server.wait_ready()
    assert server.engine_pid not in (None, engine_pid)
    assert complete(server).status_code == 200
    assert server.metric("wavelane_engine_restarts_total") >= 1
    assert_all_blocks_free(server)


def test_sigstop_of_the_engine(server: BentoServer) -> None:
    engine_pid = server.engine_pid
    assert engine_pid is not None
    stream = Stream(server, 5000).wait_begun()
    os.kill(engine_pid, signal.SIGSTOP)
    eventually(lambda: server.status("/readyz") == 503, RED_LIMIT_S + 1, 0.02)  # the second is a busy machine's
    assert_ended_with_an_error(stream)
    assert server.http.get("/health").status_code == 503
    server.wait_ready()
    assert not psutil.pid_exists(engine_pid)
    assert complete(server).status_code == 200


def test_signals_to_the_engine_alone_change_nothing(server: BentoServer) -> None:
    engine_pid = server.engine_pid
    assert engine_pid is not None
    stream = Stream(server, 60).wait_begun()
    os.kill(engine_pid, signal.SIGTERM)
    os.kill(engine_pid, signal.SIGINT)
    assert stream.wait_ended().finish_reason == "length"
    assert server.engine_pid == engine_pid


# --- clients -------------------------------------------------------------------------------------------------------


def leave_early(server: BentoServer, *, streamed: bool, num_prompt_tokens: int) -> None:
    """Send a request for thousands of tokens, then close the connection without a word."""
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": [1] * num_prompt_tokens,
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": streamed,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {server.url}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        if streamed:
            assert connection.recv(64).startswith(b"HTTP/1.1 200")


def test_two_hundred_clients_that_leave(server: BentoServer) -> None:
    for number in range(200):
        leave_early(server, streamed=number % 2 == 0, num_prompt_tokens=3 if number % 3 else 2000)
    assert_all_blocks_free(server)
    eventually(lambda: server.metric("wavelane_streams_open") == 0)
    assert complete(server).status_code == 200
    assert server.status("/readyz") == 200


def test_a_front_end_that_lags_merges_and_loses_nothing(server: BentoServer) -> None:
    """The HTTP process stands still while its engine goes on: then several tokens come in one event, all of them."""
    worker_pid, engine_pid = server.worker_pid, server.engine_pid
    assert worker_pid is not None
    stream = Stream(server, 400).wait_begun()
    os.kill(worker_pid, signal.SIGSTOP)
    time.sleep(1.0)  # a hundred steps, six times the window
    os.kill(worker_pid, signal.SIGCONT)
    stream.wait_ended()
    ids = [token_id for event in stream.events for token_id in event["choices"][0]["token_ids"]]
    assert stream.finish_reason == "length"
    assert ids == [simulated_token(f"{stream.events[0]['id']}-0", 3 + place, VOCAB_SIZE) for place in range(400)]
    assert max(len(event["choices"][0]["token_ids"]) for event in stream.events) > 16
    assert server.engine_pid == engine_pid


# --- the HTTP process and its supervisor ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_lets_streams_finish(own_server: BentoServer, number: signal.Signals) -> None:
    stream = Stream(own_server, 200).wait_begun()
    own_server.send(number)
    eventually(lambda: own_server.status("/readyz") == 503, 5, 0.01)
    refused = complete(own_server)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_unavailable"
    stream.wait_ended()
    assert (stream.error, stream.is_done, stream.finish_reason) == (None, True, "length")
    assert len(stream.events) == 200
    assert own_server.wait_exit() == 0
    own_server.wait_gone(5)


def test_ctrl_c_reaches_every_process_and_streams_still_finish(own_server: BentoServer) -> None:
    """A terminal sends SIGINT to the whole process group; the supervisor adds a SIGTERM."""
    stream = Stream(own_server, 150).wait_begun()
    os.killpg(own_server.process.pid, signal.SIGINT)
    assert stream.wait_ended().finish_reason == "length"
    assert own_server.wait_exit() == 0
    own_server.wait_gone(5)


def test_a_drain_that_takes_too_long_ends_with_an_error_event(tmp_path: Path) -> None:
    with start(tmp_path, WAVELANE_HTTP__DRAIN_DEADLINE_S="1") as server:
        server.wait_ready()
        stream = Stream(server, 5000).wait_begun()
        server.send(signal.SIGTERM)
        assert_ended_with_an_error(stream)
        assert server.wait_exit() == 0
        server.wait_gone(5)


def test_sigkill_of_the_http_process(own_server: BentoServer) -> None:
    engine_pid, worker_pid = own_server.engine_pid, own_server.worker_pid
    assert engine_pid is not None
    assert worker_pid is not None
    stream = Stream(own_server, 5000).wait_begun()
    os.kill(worker_pid, signal.SIGKILL)
    stream.wait_ended()
    assert not stream.is_done
    eventually(lambda: not psutil.pid_exists(engine_pid), 5)
    own_server.wait_ready()  # the supervisor starts another one
    assert own_server.worker_pid != worker_pid
    assert complete(own_server).status_code == 200


def test_sigkill_of_the_supervisor(own_server: BentoServer) -> None:
    Stream(own_server, 5000).wait_begun()
    own_server.send(signal.SIGKILL)
    own_server.wait_exit()
    own_server.wait_gone(5)
