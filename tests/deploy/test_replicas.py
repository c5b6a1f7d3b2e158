"""Two replicas behind nginx, by `deploy/nginx.conf`; one is killed and comes back: only what it had begun suffers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.server import ROOT, BentoServer, eventually, free_port
from tests.support.tiny_tokenizers import write_byte_level

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx"),
]
CLIENTS = 6


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[BentoServer]]:
    model = tmp_path / "model"
    model.mkdir()
    write_byte_level(model)
    env = {
        "WAVELANE_ENGINE__EXECUTOR": "simulated",
        "WAVELANE_MODELS__0__SOURCE": str(model),
        "WAVELANE_MODELS__0__SERVED_NAMES": "[tiny]",
        "WAVELANE_SIMULATED__VOCAB_SIZE": "256",
        "WAVELANE_SIMULATED__STEP_US": "5000",
        "WAVELANE_WATCHDOG__RESTART_BACKOFF_S": "0.1",
    }
    with ExitStack() as stack:
        servers = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            servers.append(stack.enter_context(BentoServer(tmp_path / name, env)))
        for server in servers:
            server.wait_ready()
        yield servers


@pytest.fixture
def proxy(replicas: list[BentoServer], tmp_path: Path) -> Iterator[str]:
    """nginx as the file has it, with the ports and folders of this test."""
    port = free_port()
    text = (ROOT / "deploy" / "nginx.conf").read_text()
    places = {
        "listen 3000": f"listen 127.0.0.1:{port}",
        "127.0.0.1:3001": f"127.0.0.1:{replicas[0].port}",
        "127.0.0.1:3002": f"127.0.0.1:{replicas[1].port}",
        "/tmp/wavelane-nginx": f"{tmp_path}/nginx",
    }
    for here, there in places.items():
        assert here in text
        text = text.replace(here, there)
    config = tmp_path / "nginx.conf"
    config.write_text(text)
    with (tmp_path / "nginx.log").open("wb") as log:
        nginx = subprocess.Popen(["nginx", "-c", config, "-g", "daemon off;"], stdout=log, stderr=log)
        try:
            eventually(lambda: nginx.poll() is None and _answers(port))
            yield f"http://127.0.0.1:{port}"
        finally:
            nginx.terminate()
            nginx.wait(20)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.HTTPError:
        return False


class Load:
    """Clients behind the proxy; `seen` counts how their requests ended."""

    def __init__(self, url: str) -> None:
        self.seen: Counter[str] = Counter()
        self._url = f"{url}/v1/completions"
        self._is_stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=30) as client:
            while not self._is_stopping.is_set():
                try:
                    response = client.post(self._url, json=body)
                except httpx.HTTPError:
                    self.seen["broken"] += 1
                    continue
                whole = response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text
                self.seen["good" if whole else f"bad {response.status_code}"] += 1


def _more(load: Load, number: int) -> None:
    good = load.seen["good"]
    eventually(lambda: load.seen["good"] >= good + number, 60)


def test_a_replica_dies_and_comes_back(replicas: list[BentoServer], proxy: str) -> None:
    victim, other = replicas
    with Load(proxy) as load:
        _more(load, 2 * CLIENTS)
        assert set(load.seen) == {"good"}
        for kill in (victim.engine_pid, victim.worker_pid):
            assert kill is not None
            before = sum(load.seen.values()) - load.seen["good"]
            os.kill(kill, signal.SIGKILL)
            _more(load, 4 * CLIENTS)  # while it is away
            failed = sum(load.seen.values()) - load.seen["good"] - before
            assert failed <= CLIENTS, f"more failed than were in flight: {load.seen}"
            victim.wait_ready()
            time.sleep(1.5)  # nginx's rest for it
            steps = victim.engine_stats()["steps"]
            _more(load, 4 * CLIENTS)
            assert victim.engine_stats()["steps"] > steps, "it gets no requests any more"
    assert other.metric("wavelane_engine_restarts_total") == 0


def test_a_replica_is_replaced_without_one_failed_request(replicas: list[BentoServer], proxy: str) -> None:
    """SIGTERM, as every rollout sends it: streams end whole, new requests go to the other one."""
    leaving, _ = replicas
    with Load(proxy) as load:
        _more(load, 2 * CLIENTS)
        leaving.send(signal.SIGTERM)
        assert leaving.wait_exit() == 0
        _more(load, 4 * CLIENTS)
    assert set(load.seen) == {"good"}, load.seen
