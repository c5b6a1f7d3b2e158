"""Soak of two replicas behind nginx (`deploy/nginx.conf`), of which one and then the other is killed and started again.

    python -m benchmarks.soak_replicas                 6 minutes on the default model; needs nginx

The clients are those of `benchmarks.soak_clients`. nginx notes which replica each request went to, and when: it fails
(exit 1) on a request that failed without having been in flight on a replica when that was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.http_path import wait_ready
from benchmarks.soak import SETTINGS
from benchmarks.soak_clients import Fault, Soak

ROOT = Path(__file__).resolve().parents[1]
AWAY_S = 5.0
"""From the kill until the replica is started again, as an orchestrator would."""
LOG_FORMAT = "log_format soak '$http_x_request_id|$upstream_addr|$status|$msec|$request_time';\n    access_log %s soak;"


@dataclass(frozen=True, slots=True)
class Passage:
    """A request's way through nginx: the replicas it went to, in order, and when (Unix time)."""

    replicas: tuple[str, ...]
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Kill:
    """`replica` is its address, `at` Unix time, `ready_s` the seconds from its new start until it was ready."""

    replica: str
    at: float
    ready_s: float


class Replica:
    """One `bentoml serve`, which can be killed as a whole and started again at the same port."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("wb")
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "bentoml", "serve", "service:Wavelane", "--host", "127.0.0.1"]
        environment = {**SETTINGS, **os.environ, "BENTOML_DO_NOT_TRACK": "True"}
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port)], cwd=ROOT, env=environment, stdout=self._log, stderr=self._log
        )

    def wait_ready(self) -> str:
        return wait_ready(self._process, self.port)

    def kill(self) -> None:
        """Every process of it at once, as the end of its machine would."""
        root = psutil.Process(self._process.pid)
        for process in [root, *root.children(recursive=True)]:
            process.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def steps(self) -> int:
        return int(httpx.get(f"http://{self.address}/health", timeout=10).json()["engine"]["steps"])

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)
        self._log.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start_proxy(folder: Path, replicas: list[Replica], port: int) -> subprocess.Popen[bytes]:
    """nginx as the deployment's file has it, with the ports and folders of this run and a log of passages."""
    text = (ROOT / "deploy" / "nginx.conf").read_text()
    places = {
        "listen 3000": f"listen 127.0.0.1:{port}",
        "127.0.0.1:3001": replicas[0].address,
        "127.0.0.1:3002": replicas[1].address,
        "/tmp/wavelane-nginx": f"{folder}/nginx",
        "access_log off;": LOG_FORMAT % (folder / "passages"),
    }
    for here, there in places.items():
        if here not in text:
            sys.exit(f"deploy/nginx.conf has no {here!r}")
        text = text.replace(here, there)
    (folder / "nginx.conf").write_text(text)
    log = (folder / "nginx.log").open("wb")
    return subprocess.Popen(["nginx", "-c", folder / "nginx.conf", "-g", "daemon off;"], stdout=log, stderr=log)


async def kill_in_turn(replicas: list[Replica], seconds: float) -> list[Kill]:
    """One at a third of the time, the other at two thirds."""
    kills = []
    for replica in replicas:
        await asyncio.sleep(seconds / 3 - AWAY_S)
        at = time.time()
        replica.kill()
        await asyncio.sleep(AWAY_S)
        replica.start()
        started = time.time()
        await asyncio.to_thread(replica.wait_ready)
        kills.append(Kill(replica.address, at, time.time() - started))
    return kills


def read_passages(path: Path) -> dict[str, Passage]:
    passages = {}
    for line in path.read_text().splitlines():
        request_id, replicas, _, end, seconds = line.split("|")
        addresses = tuple(part.strip() for part in replicas.split(","))
        passages[request_id] = Passage(addresses, float(end) - float(seconds), float(end))
    return passages


def was_in_flight(fault: Fault, passages: dict[str, Passage], kills: list[Kill]) -> bool:
    """Whether the request was on a replica when that was killed. nginx's clock of a request has milliseconds."""
    passage = passages.get(fault.request_id)
    if passage is None:
        return False
    return any(
        kill.replica in passage.replicas and passage.begin - 0.01 <= kill.at <= passage.end + 0.01 for kill in kills
    )


async def soak(port: int, model: str, replicas: list[Replica], seconds: float) -> tuple[Soak, list[Kill]]:
    clients = Soak(port, model, seconds)
    killer = asyncio.create_task(kill_in_turn(replicas, seconds))
    await clients.run()
    return clients, await killer


def report_of(clients: Soak, kills: list[Kill], passages: dict[str, Passage]) -> dict[str, Any]:
    others = [fault for fault in clients.faults if not was_in_flight(fault, passages, kills)]
    ways = Counter(" then ".join(passage.replicas) for passage in passages.values())
    return {
        "load_average": os.getloadavg(),
        "answers": {f"{kind} {end}": count for (kind, end), count in sorted(clients.seen.items())},
        "requests_by_replica": dict(ways),
        "requests_taken_over": sum(len(passage.replicas) > 1 for passage in passages.values()),
        "kills": [{"replica": kill.replica, "ready_s": round(kill.ready_s, 2)} for kill in kills],
        "failed_in_flight": Counter(
            f"{fault.kind}: {fault.what[:80]}" for fault in clients.faults if fault not in others
        ),
        "failed_otherwise": [f"{fault.kind}: {fault.what}" for fault in others],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak_replicas", description=__doc__)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--output", type=Path, help="write the report here, as JSON")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        replicas = [Replica(folder / f"{name}.log") for name in "ab"]
        for replica in replicas:
            stack.callback(replica.stop)
        (model,) = {replica.wait_ready() for replica in replicas}
        port = free_port()
        proxy = start_proxy(folder, replicas, port)
        stack.callback(proxy.wait, 30)
        stack.callback(proxy.terminate)
        wait_ready(proxy, port)
        clients, kills = asyncio.run(soak(port, model, replicas, 60 * options.minutes))
        served_again = all(replica.steps() > 0 for replica in replicas)
        report = report_of(clients, kills, read_passages(folder / "passages"))
    print(json.dumps(report, indent=2))
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    found = report["failed_otherwise"] + ([] if served_again else ["a replica was not used again"])
    print("\n".join(f"FAILED {what}" for what in found) or "good")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
