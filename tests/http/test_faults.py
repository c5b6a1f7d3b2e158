"""Faults under load, again and again: each time clients hear of it, the server comes back, and nothing is left held.

`WAVELANE_TEST_KILLS` and `WAVELANE_TEST_STOPS` say how often (CI: few). What clients saw and how long it took is
shown by `pytest -s`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.faulty_messages import GARBAGE
from tests.support.server import ROOT, BentoServer, eventually
from tests.support.tiny_tokenizers import write_byte_level

KILLS = int(os.environ.get("WAVELANE_TEST_KILLS", "3"))
STOPS = int(os.environ.get("WAVELANE_TEST_STOPS", "1"))
CLIENTS = 8
DEAD_LIMIT_S = 6.0

ENV = {
    "WAVELANE_ENGINE__EXECUTOR": "simulated",
    "WAVELANE_MODELS__0__SERVED_NAMES": "[tiny]",
    "WAVELANE_SIMULATED__VOCAB_SIZE": "256",
    "WAVELANE_SIMULATED__STEP_US": "5000",
    "WAVELANE_WATCHDOG__RESTART_BACKOFF_S": "0.1",
    "WAVELANE_WATCHDOG__RESTART_BACKOFF_MAX_S": "0.2",
}


def start(folder: Path, **options: Any) -> BentoServer:
    model = folder / "model"
    model.mkdir()
    write_byte_level(model)
    env = {**ENV, "WAVELANE_MODELS__0__SOURCE": str(model), **options.pop("env", {})}
    return BentoServer(folder, env, **options)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BentoServer]:
    with start(tmp_path) as server:
        server.wait_ready()
        yield server


class Load:
    """Clients that send one request after another; `seen` counts how each ended."""

    def __init__(self, server: BentoServer) -> None:
        self.seen: Counter[str] = Counter()
        self._url = f"{server.url}/v1/completions"
        self._is_stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=50) as client:
            while not self._is_stopping.is_set():
                self.seen[self._ask(client, streams=number % 2 == 0)] += 1

    def _ask(self, client: httpx.Client, *, streams: bool) -> str:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 50, "ignore_eos": True, "stream": streams}
        try:
            response = client.post(self._url, json=body)
        except httpx.ConnectError:
            time.sleep(0.05)
            return "refused"
        except httpx.HTTPError as error:
            return f"broken: {type(error).__name__}"
        if response.status_code == 503:
            assert int(response.headers["retry-after"]) >= 1
            time.sleep(0.05)
            return "503"
        if response.status_code != 200:
            return f"status {response.status_code}"
        if not streams:
            return "good" if response.json()["usage"]["completion_tokens"] == 50 else "short answer"
        if not response.text.endswith("data: [DONE]\n\n"):
            return "no end"
        if '"error"' in response.text:
            assert '"engine_unavailable"' in response.text
            return "error event"
        return "good" if response.text.count("data: ") >= 2 else "short stream"


ALLOWED = {"good", "503", "error event"}


def strike(server: BentoServer, load: Load, number: signal.Signals) -> float:
    """Hit the engine while requests run; seconds until the server is ready again with another engine."""
    good = load.seen["good"]
    eventually(lambda: load.seen["good"] > good)
    eventually(lambda: server.engine_stats()["running"] > 0)
    engine_pid = server.engine_pid
    assert engine_pid is not None
    os.kill(engine_pid, number)
    started = time.monotonic()
    eventually(lambda: server.status("/readyz") == 503, DEAD_LIMIT_S, 0.005)
    assert server.status("/livez") == 200
    eventually(lambda: server.status("/readyz") == 200, 60, 0.02)
    assert not psutil.pid_exists(engine_pid)
    return time.monotonic() - started


def assert_nothing_is_held(server: BentoServer) -> None:
    def free() -> bool:
        stats = server.engine_stats()
        return bool(stats["running"] == stats["waiting"] == 0 and stats["free_blocks"] == stats["total_blocks"])

    eventually(free)
    assert server.metric("wavelane_streams_open") == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("number", "times"), [(signal.SIGKILL, KILLS), (signal.SIGSTOP, STOPS)])
def test_an_engine_struck_again_and_again(server: BentoServer, number: signal.Signals, times: int) -> None:
    with Load(server) as load:
        seconds = [strike(server, load, number) for _ in range(times)]
        good = load.seen["good"]
        eventually(lambda: load.seen["good"] >= good + CLIENTS)
    took = f"ready after {min(seconds):.2f} to {max(seconds):.2f} s"
    print(f"\n{number.name} x{times}: {took}; clients saw {dict(load.seen)}")
    assert set(load.seen) <= ALLOWED, load.seen
    assert load.seen["503"] + load.seen["error event"] > 0
    assert server.metric("wavelane_engine_restarts_total") == times
    assert_nothing_is_held(server)


def told(fault: str, load: Load, seconds: float | None = None) -> None:
    """For `pytest -s`."""
    ready = "" if seconds is None else f"; ready after {seconds:.2f} s"
    print(f"\n{fault}: clients saw {dict(load.seen)}{ready}")


@pytest.fixture(params=["/dev/full", "tmpfs"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file on which every write fails with ENOSPC; one on a small file system fails only once that is full."""
    if request.param != "tmpfs":
        yield Path(request.param)
        return
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("may not mount a tmpfs here")
    try:
        yield folder / "server.log"
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
def test_a_log_on_a_full_disk(tmp_path: Path, full_disk: Path) -> None:
    """A write of a log line fails with ENOSPC, in both processes; requests do not notice."""
    with start(tmp_path, log_path=full_disk) as server:
        server.wait_ready()
        with Load(server) as load:
            eventually(lambda: load.seen["good"] > 100)
            seconds = strike(server, load, signal.SIGKILL)  # which has much to say
            good = load.seen["good"]
            eventually(lambda: load.seen["good"] >= good + CLIENTS)
        with pytest.raises(OSError, match="No space left"), full_disk.open("ab", buffering=0) as log:
            log.write(bytes(8192))
        told(f"log on {full_disk.parent}, full, and an engine killed", load, seconds)
        assert set(load.seen) <= ALLOWED, load.seen
        assert_nothing_is_held(server)


@pytest.mark.slow
def test_sigterm_under_load(tmp_path: Path) -> None:
    """What runs ends whole, what comes is refused: with 503 while it drains, then at the door."""
    with start(tmp_path, env={"WAVELANE_SIMULATED__STEP_US": "20000"}) as server:
        server.wait_ready()
        with Load(server) as load:
            eventually(lambda: load.seen["good"] >= CLIENTS)
            server.send(signal.SIGTERM)
            eventually(lambda: load.seen["refused"] >= CLIENTS)
            assert server.wait_exit() == 0
        told("SIGTERM", load)
        # BentoML's supervisor holds the listening socket too: who connects while only it does is reset when it ends.
        broken = sum(count for how, count in load.seen.items() if how.startswith("broken"))
        assert broken <= 2 * CLIENTS
        assert {how for how in load.seen if not how.startswith("broken")} == {"good", "503", "refused"}
        server.wait_gone(5)


@pytest.mark.slow
def test_sigkill_of_the_http_process_under_load(server: BentoServer) -> None:
    """What it was answering breaks, once a client; what comes waits at the listening socket, which is its parent's."""
    with Load(server) as load:
        eventually(lambda: load.seen["good"] > 2 * CLIENTS)
        worker_pid, engine_pid = server.worker_pid, server.engine_pid
        assert worker_pid is not None
        assert engine_pid is not None
        os.kill(worker_pid, signal.SIGKILL)
        started = time.monotonic()
        eventually(lambda: server.status("/readyz") == 200, 60, 0.02)
        seconds = time.monotonic() - started
        good = load.seen["good"]
        eventually(lambda: load.seen["good"] >= good + CLIENTS)
    told("SIGKILL of the HTTP process", load, seconds)
    broken = sum(count for how, count in load.seen.items() if how.startswith("broken"))
    assert 0 < broken <= CLIENTS
    assert {how for how in load.seen if not how.startswith("broken")} <= {"good", "503"}
    assert not psutil.pid_exists(engine_pid)
    assert_nothing_is_held(server)


@pytest.mark.slow
def test_corrupt_messages_under_load(tmp_path: Path) -> None:
    """Dropped, logged and counted on either side; nobody else notices."""
    with start(tmp_path, target="tests.support.faulty_service:Wavelane") as server:
        server.wait_ready()
        worker_pid, engine_pid = server.worker_pid, server.engine_pid
        assert worker_pid is not None
        with Load(server) as load:
            for times in range(1, 11):
                good = load.seen["good"]
                os.kill(worker_pid, signal.SIGUSR1)
                corrupt = times * len(GARBAGE)
                eventually(lambda corrupt=corrupt: server.metric("wavelane_ipc_corrupt_messages_total") == corrupt)  # type: ignore[misc]
                eventually(lambda good=good: load.seen["good"] >= good + CLIENTS)  # type: ignore[misc]
            eventually(lambda: server.metric("wavelane_engine_ipc_corrupt_messages_total") == 10 * len(GARBAGE))
        told(f"{10 * len(GARBAGE)} corrupt messages each way", load, 0.0)
        assert set(load.seen) == {"good"}
        assert server.engine_pid == engine_pid
        assert_nothing_is_held(server)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_wall_clock_that_jumps(tmp_path: Path) -> None:
    """A day ahead, then a week back: no beat counts as missed, no deadline as passed, no request ends."""
    library, shift = tmp_path / "clock.so", tmp_path / "shift"
    source = ROOT / "tests" / "support" / "shifted_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    shift.write_text("0")
    env = {
        "LD_PRELOAD": str(library),
        "SHIFT_FILE": str(shift),
        "WAVELANE_LIMITS__REQUEST_DEADLINE_S": "60",
    }
    with start(tmp_path, env=env) as server:
        server.wait_ready()
        engine_pid = server.engine_pid
        body = {"model": "tiny", "prompt": [1], "max_tokens": 2, "ignore_eos": True}
        created = []
        with Load(server) as load:
            for seconds in (0, 86_400, -604_800):
                shift.write_text(str(seconds))
                created.append(server.http.post("/v1/completions", json=body).json()["created"])
                good = load.seen["good"]
                eventually(lambda good=good: load.seen["good"] >= good + 2 * CLIENTS)  # type: ignore[misc]
                time.sleep(2.5)  # beats and the watchdog's ticks
                assert server.status("/readyz") == 200
        told("wall clock a day ahead, a week back", load, 0.0)
        assert created[1] - created[0] > 80_000, "the clock did not jump"
        assert created[0] - created[2] > 600_000
        assert set(load.seen) == {"good"}
        assert server.engine_pid == engine_pid
        assert server.metric("wavelane_engine_restarts_total") == 0
        assert_nothing_is_held(server)


def test_nobody_else_can_speak_to_the_engine(server: BentoServer) -> None:
    """Its socket has lost its name once the HTTP process is connected, and it listens nowhere else."""
    engine = psutil.Process(server.engine_pid)
    named = [connection.laddr for connection in engine.net_connections(kind="unix") if connection.laddr]
    assert [name for name in named if "wavelane-" in name], "its own socket is not among them"
    assert [name for name in named if Path(name).exists()] == []
    assert [name for name in named if name.startswith(("@", "\0"))] == [], "an abstract socket is anybody's"
    assert engine.net_connections(kind="inet") == []
