"""`bentoml serve` as a user starts it, on a free port, with every process it leads to known and accounted for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
_MARK = "WAVELANE_TEST_RUN"
START_LIMIT_S = 120.0


def eventually(condition: Callable[[], Any], limit_s: float = 30.0, interval_s: float = 0.05) -> Any:
    """The first true value of `condition`; AssertionError when there is none within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {limit_s} s: {condition}"
        time.sleep(interval_s)


class BentoServer:
    """One `bentoml serve`, of the project or of `target`. `env` holds profile variables; output goes to `log_path`, or
    to server.log in `log_folder`.

    Every process of it carries a mark in its environment, so that orphans are found whoever their parent is.
    """

    def __init__(
        self,
        log_folder: Path,
        env: Mapping[str, str],
        *,
        target: str = "service:Wavelane",
        folder: Path = ROOT,
        log_path: Path | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_folder / "server.log" if log_path is None else log_path
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WAVELANE_")}
        if "WAVELANE_CACHE" in os.environ:
            environment["WAVELANE_CACHE"] = os.environ["WAVELANE_CACHE"]
        environment |= {"BENTOML_DO_NOT_TRACK": "True", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        environment |= {_MARK: self.mark, **env}
        command = [sys.executable, "-m", "bentoml", "serve", target, "--host", "127.0.0.1"]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.http = httpx.Client(base_url=self.url, timeout=30.0, limits=httpx.Limits(max_keepalive_connections=0))

    # --- what it says ---------------------------------------------------------------------------------------------

    def status(self, path: str) -> int | None:
        """HTTP status, None where nobody answers."""
        try:
            return self.http.get(path, timeout=5.0).status_code
        except httpx.HTTPError:
            return None

    def health(self) -> dict[str, Any]:
        report: dict[str, Any] = self.http.get("/health").json()
        return report

    def engine_stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.health()["engine"]
        return stats

    def metric(self, name: str) -> float:
        """A sample of `/metrics` without labels. KeyError when there is none."""
        for line in self.http.get("/metrics").text.splitlines():
            words = line.split()
            if words and words[0] == name:
                return float(words[1])
        raise KeyError(name)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.is_file() else ""

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the server has ended:\n{self.log()}"
            return self.status("/readyz") == 200

        try:
            eventually(ready, limit_s, 0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    # --- its processes --------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Every live process of this server."""
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(_MARK) == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def _pid_of(self, module: str) -> int | None:
        for process in self.processes():
            try:
                if module in process.cmdline():
                    return process.pid
            except psutil.NoSuchProcess:
                continue
        return None

    @property
    def worker_pid(self) -> int | None:
        """The HTTP process."""
        return self._pid_of("_bentoml_impl.worker.service")

    @property
    def engine_pid(self) -> int | None:
        return self._pid_of("runners.engine_core")

    def wait_gone(self, limit_s: float = 30.0) -> None:
        """No process of this server is left."""
        eventually(lambda: not self.processes(), limit_s)

    def send(self, number: signal.Signals) -> None:
        """A signal to the supervisor alone."""
        self.process.send_signal(number)

    def wait_exit(self, limit_s: float = 60.0) -> int:
        return self.process.wait(limit_s)

    def close(self) -> None:
        """End it, gracefully if it still can."""
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for process in self.processes():
            process.kill()
        self.process.wait(10)

    def __enter__(self) -> BentoServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
