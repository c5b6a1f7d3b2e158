"""Soak: one server, every kind of client at once, for minutes; what it answered, and whether anything grew.

    python -m benchmarks.soak                 20 minutes on the default model
    python -m benchmarks.soak --minutes 3

Clients: chats and completions (streamed and whole), token ids, sessions, clients that leave in the middle, wrong
requests, clients that read slowly or not at all, floods over the queue's limit. It fails (exit 1) on a status 5xx or a
connection that breaks by itself, on resident memory that grows by more than 3 % after the warm-up, on a KV block that
is not free at the end, and on an engine that was restarted. Profile variables (WAVELANE_…) reach the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.http_path import find, wait_ready

ROOT = Path(__file__).resolve().parents[1]
MAX_GROWTH = 0.03
SLOTS = 8
MAX_QUEUED = 24
SETTINGS = {
    "WAVELANE_ENGINE__SLOTS": str(SLOTS),
    "WAVELANE_ENGINE__CPU_CORES": "1",
    "WAVELANE_ADMISSION__MAX_QUEUED_REQUESTS": str(MAX_QUEUED),
    # Small, so that the warm-up has touched every page of it and requests compete for blocks.
    "WAVELANE_KV__POOL": "{blocks: 384}",
    "WAVELANE_HTTP__SEND_TIMEOUT_S": "5",
    "WAVELANE_TELEMETRY__REQUEST_LOG": "false",
}
WRONG_REQUESTS: tuple[tuple[str, Any], ...] = (
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [1, 2], "max_tokens": -1}),
    ("/v1/completions", {"prompt": [10**9]}),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}),
    ("/v1/chat/completions", {"messages": "hello"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10**7}),
    ("/v1/completions", {"prompt": "x", "model": "no-such-model"}),
    ("/v1/no/such/path", {}),
)
WORDS = ("the", "sea", "a", "ship", "storm", "light", "harbour", "captain", "wave", "night", "island", "star", "rope")


class Soak:
    """The clients. `seen` counts (kind of client, how it ended)."""

    def __init__(self, port: int, model: str, seconds: float) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []
        self._port = port
        self._model = model
        self._random = random.Random(7)
        self._ends = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=limits)

    async def run(self) -> None:
        kinds: dict[Callable[[], Awaitable[None]], int] = {
            self._chat: 2,
            self._ids: 2,
            self._session: 1,
            self._leave: 2,
            self._wrong: 1,
            self._slow_reader: 1,
            self._no_reader: 1,
            self._flood: 1,
        }
        async with self._http:
            await asyncio.gather(*(self._repeat(kind) for kind, number in kinds.items() for _ in range(number)))

    async def _repeat(self, kind: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < self._ends:
            try:
                await kind()
            except (httpx.HTTPError, OSError, asyncio.IncompleteReadError) as error:
                self._fault(kind.__name__, f"the connection broke: {error!r}")

    def _fault(self, kind: str, what: str) -> None:
        self.seen[kind, "fault"] += 1
        if len(self.faults) < 20:
            self.faults.append(f"{kind}: {what}")

    def _check(self, kind: str, response: httpx.Response, *expected: int) -> bool:
        """Whether the answer is a good one; what was not expected is a fault."""
        self.seen[kind, str(response.status_code)] += 1
        if response.status_code not in expected:
            self._fault(kind, f"status {response.status_code}: {response.text[:200]}")
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        if is_stream and (not response.text.endswith("data: [DONE]\n\n") or '"error"' in response.text):
            self._fault(kind, f"a stream ended badly: {response.text[-200:]!r}")
        return response.status_code == 200

    def _text(self, num_words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=num_words))

    def _sampling(self) -> dict[str, Any]:
        if self._random.random() < 0.5:
            return {"temperature": 0}
        return {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.2}

    async def _chat(self) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": self._text(self._random.randint(3, 60))}],
            "max_tokens": self._random.randint(1, 40),
            "stream": self._random.random() < 0.5,
            **self._sampling(),
        }
        self._check("chat", await self._http.post("/v1/chat/completions", json=body), 200, 429)

    async def _ids(self) -> None:
        body = {
            "model": self._model,
            "prompt": [self._random.randint(5, 40_000) for _ in range(self._random.choice((3, 23, 128, 500)))],
            "max_tokens": self._random.randint(1, 60),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self._random.random() < 0.5,
            "logprobs": self._random.choice((None, 3)),
            **self._sampling(),
        }
        self._check("ids", await self._http.post("/v1/completions", json=body), 200, 429)

    async def _session(self) -> None:
        session = f"soak-{self._random.randrange(10**9)}"
        for _ in range(4):
            body = {
                "model": self._model,
                "prompt": self._text(8),
                "session_id": session,
                "max_tokens": 12,
                **self._sampling(),
            }
            self._check("session", await self._http.post("/v1/completions", json=body), 200, 429)
        self._check("session", await self._http.delete(f"/v1/sessions/{session}"), 200, 404)

    async def _leave(self) -> None:
        """Close the connection before the first token, or after a few."""
        body = {"model": self._model, "prompt": self._text(40), "max_tokens": 400, "ignore_eos": True, "stream": True}
        reader, writer = await self._send(body)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._random.uniform(0.0, 2.0)):
                while await reader.read(4096):
                    pass
        writer.close()
        self.seen["leaves", "left"] += 1
        await asyncio.sleep(0.2)

    async def _wrong(self) -> None:
        path, body = self._random.choice(WRONG_REQUESTS)
        self._check("wrong", await self._http.post(path, json=body), 400, 404)
        self._check("wrong", await self._http.post(path, content=b'{"prompt": '), 400, 404)
        await asyncio.sleep(0.1)

    async def _slow_reader(self) -> None:
        """A few bytes at a time; every one of them arrives."""
        body = {"model": self._model, "prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True, "stream": True}
        reader, writer = await self._send(body)
        received = b""
        while part := await reader.read(256):
            received += part
            await asyncio.sleep(0.05)
        writer.close()
        status = received.split(b" ", 2)[1].decode() if received else "nothing"
        self.seen["slow reader", status] += 1
        if status not in ("200", "429") or (status == "200" and b"data: [DONE]" not in received):
            self._fault("slow reader", f"{status}, {len(received)} bytes: {received[-200:]!r}")

    async def _no_reader(self) -> None:
        """Never reads; the server drops it after `http.send_timeout_s`, or has sent everything into its buffers."""
        body = {
            "model": self._model,
            "prompt": [5, 6, 7],
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 20,
        }
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(connection, ("127.0.0.1", self._port))
            await loop.sock_sendall(connection, self._head(body))
            await asyncio.sleep(10)
        finally:
            connection.close()
        self.seen["no reader", "waited"] += 1

    async def _flood(self) -> None:
        """More at once than there are places and queue; what is refused says when to come back."""
        body = {"model": self._model, "prompt": [9, 8, 7], "max_tokens": 4, "ignore_eos": True}
        number = SLOTS + 2 * MAX_QUEUED
        answers = await asyncio.gather(*(self._http.post("/v1/completions", json=body) for _ in range(number)))
        for answer in answers:
            self._check("flood", answer, 200, 429)
            if answer.status_code == 429 and int(answer.headers.get("retry-after", "0")) < 1:
                self._fault("flood", "a 429 without Retry-After")
        await asyncio.sleep(10)

    def _head(self, body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content

    async def _send(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=4096)
        writer.write(self._head(body))
        return reader, writer


class Memory:
    """Resident memory of processes, once a second [bytes]."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.samples: dict[str, list[int]] = {name: [] for name in pids}
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}

    async def watch(self) -> None:
        while True:
            for name, process in self._processes.items():
                self.samples[name].append(process.memory_info().rss)
            await asyncio.sleep(1)

    def report(self, warm_up: float) -> dict[str, dict[str, float]]:
        """Of each process: MiB after the warm-up and at the end (medians over a tenth of the time), and the growth."""
        report = {}
        for name, samples in self.samples.items():
            width = max(1, len(samples) // 10)
            begin = int(len(samples) * warm_up)
            before = statistics.median(samples[begin : begin + width])
            after = statistics.median(samples[-width:])
            report[name] = {
                "after_warm_up_mib": round(before / 2**20, 1),
                "end_mib": round(after / 2**20, 1),
                "growth": round(after / before - 1, 4),
            }
        return report


def engine_stats(port: int) -> dict[str, Any]:
    stats: dict[str, Any] = httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).json()["engine"]
    return stats


def restarts(port: int) -> float:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    line = next(line for line in text.splitlines() if line.startswith("wavelane_engine_restarts_total "))
    return float(line.split()[1])


async def soak(port: int, model: str, pids: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    before = engine_stats(port)
    clients, memory = Soak(port, model, 60 * options.minutes), Memory(pids)
    watcher = asyncio.create_task(memory.watch())
    await clients.run()
    watcher.cancel()
    after = engine_stats(port)
    for _ in range(100):  # clients that left in the last moment
        if after["running"] == after["waiting"] == 0 and after["free_blocks"] == before["free_blocks"]:
            break
        await asyncio.sleep(0.2)
        after = engine_stats(port)
    return {
        "minutes": options.minutes,
        "answers": {f"{kind} {end}": count for (kind, end), count in sorted(clients.seen.items())},
        "faults": clients.faults,
        "memory": memory.report(options.warm_up),
        "free_blocks": {"before": before["free_blocks"], "after": after["free_blocks"]},
        "tokens": {"prompt": after["prompt_tokens"], "generated": after["generation_tokens"]},
        "steps": after["steps"],
        "preemptions": after["preemptions"],
        "engine_restarts": restarts(port),
    }


def failures(report: dict[str, Any]) -> list[str]:
    found = list(report["faults"])
    found += [
        f"{name}: memory grew by {m['growth']:.1%}" for name, m in report["memory"].items() if m["growth"] > MAX_GROWTH
    ]
    if report["free_blocks"]["before"] != report["free_blocks"]["after"]:
        found.append(f"KV blocks are held: {report['free_blocks']}")
    if report["engine_restarts"]:
        found.append(f"the engine was restarted {report['engine_restarts']:.0f} times")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=0.25, help="share of the time before memory must be flat")
    parser.add_argument("--output", type=Path, help="write the report here, as JSON")
    options = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    environment = {**SETTINGS, **os.environ, "BENTOML_DO_NOT_TRACK": "True"}
    command = [sys.executable, "-m", "bentoml", "serve", "service:Wavelane", "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            model = wait_ready(server, port)
            root = psutil.Process(server.pid)
            pids = {"http": find(root, "_bentoml_impl.worker.service"), "engine": find(root, "runners.engine_core")}
            report = asyncio.run(soak(port, model, pids, options))
        except BaseException:
            log.seek(0)
            print(log.read().decode(errors="replace")[-5000:], file=sys.stderr)
            raise
        finally:
            server.terminate()
            server.wait(60)
    print(json.dumps(report, indent=2))
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    found = failures(report)
    print("\n".join(f"FAILED {what}" for what in found) or "good")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
