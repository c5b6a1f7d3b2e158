"""CPU time of the HTTP process per streamed event: `bentoml serve` on the simulated executor.

    python -m benchmarks.http_path --streams 64 --tokens 256
    python -m benchmarks.http_path --fields '{"stop": ["never said"], "logprobs": 5}' --target-us 110

Every step brings one token to every stream, so an event carries one token, detokenised by the default model's
tokenizer. CPU time is the HTTP process's own (user and system, all threads, from /proc), so it does not depend on how
busy the machine is otherwise; the client that reads the streams is another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
TARGET_US = 75.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Round:
    """One burst of streams, all begun at once."""

    events: int
    tokens: int
    seconds: float
    cpu_us_per_event: float
    engine_cpu_us_per_event: float


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads (proc(5): fields 14 and 15 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


async def read_stream(port: int, tokens: int, fields: dict[str, Any]) -> int:
    """Events of one streamed completion."""
    body = json.dumps(
        {"prompt": list(range(100, 123)), "max_tokens": tokens, "ignore_eos": True, "stream": True, **fields}
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    events = 0
    tail = b""
    while data := await reader.read(1 << 16):
        data = tail + data
        events += data.count(b"data: ")
        tail = data[-5:] if not data.endswith(b"\n") else b""
        events -= tail.count(b"data: ")
    writer.close()
    return events - 1  # [DONE]


async def run_round(port: int, pids: tuple[int, int], streams: int, tokens: int, fields: dict[str, Any]) -> Round:
    before = [cpu_seconds(pid) for pid in pids]
    start = time.perf_counter()
    counts = await asyncio.gather(*(read_stream(port, tokens, fields) for _ in range(streams)))
    seconds = time.perf_counter() - start
    http_s, engine_s = (cpu_seconds(pid) - used for pid, used in zip(pids, before, strict=True))
    events = sum(counts)
    return Round(events, streams * tokens, seconds, 1e6 * http_s / events, 1e6 * engine_s / events)


def find(root: psutil.Process, module: str) -> int:
    """The pid of the descendant that runs `module`."""
    return next(child.pid for child in root.children(recursive=True) if module in child.cmdline())


def wait_ready(process: subprocess.Popen[bytes], port: int) -> str:
    """The served model's name, once it is served."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit("the server has ended")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"):
                pass
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as response:
                name: str = json.load(response)["data"][0]["id"]
                return name
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit("the server does not become ready")


def serve(options: argparse.Namespace, log: Path, port: int) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "WAVELANE_ENGINE__EXECUTOR": "simulated",
        "WAVELANE_ENGINE__SLOTS": str(options.streams),
        "WAVELANE_SIMULATED__STEP_US": str(options.step_us),
        "BENTOML_DO_NOT_TRACK": "True",
    }
    if options.source:
        env["WAVELANE_MODELS__0__SOURCE"] = options.source
    command = [sys.executable, "-m", "bentoml", "serve", "service:Wavelane", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-us", type=int, default=20_000, help="time of a step; one token a stream each")
    parser.add_argument("--source", help="model whose tokenizer is used (default: the profile's)")
    parser.add_argument("--fields", type=json.loads, default={}, help="more fields of each request, as JSON")
    parser.add_argument("--target-us", type=float, default=TARGET_US)
    parser.add_argument("--json", action="store_true", help="print the rounds as JSON")
    options = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        process = serve(options, Path(folder) / "server.log", port)
        try:
            fields = {"model": wait_ready(process, port), **options.fields}
            root = psutil.Process(process.pid)
            pids = (find(root, "_bentoml_impl.worker.service"), find(root, "runners.engine_core"))
            asyncio.run(run_round(port, pids, options.streams, 16, fields))  # first requests fill caches
            rounds = [
                asyncio.run(run_round(port, pids, options.streams, options.tokens, fields))
                for _ in range(options.rounds)
            ]
        finally:
            process.terminate()
            process.wait(60)
    report(rounds, options.target_us, as_json=options.json)


def report(rounds: list[Round], target_us: float, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(item) for item in rounds]))
        return
    for item in rounds:
        print(
            f"{item.events} events of {item.tokens} tokens in {item.seconds:.2f} s: HTTP process "
            f"{item.cpu_us_per_event:.1f} µs of CPU an event, engine process {item.engine_cpu_us_per_event:.1f} µs"
        )
    median = statistics.median(item.cpu_us_per_event for item in rounds)
    print(f"median {median:.1f} µs of HTTP-process CPU an event (target {target_us:.0f})")


if __name__ == "__main__":
    main()
