"""Soak: one server, every kind of client at once, for minutes; what it answered, and whether anything grew.

    python -m benchmarks.soak                 20 minutes on the default model
    python -m benchmarks.soak --minutes 3

The clients are those of `benchmarks.soak_clients`. It fails (exit 1) on a status 5xx or a connection that breaks by
itself, on resident memory that grows by more than 3 % after the warm-up, on a KV block that is not free at the end, and
on an engine that was restarted. Profile variables (WAVELANE_…) reach the server.
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
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.http_path import find, wait_ready
from benchmarks.soak_clients import MAX_QUEUED, SLOTS, Soak

ROOT = Path(__file__).resolve().parents[1]
MAX_GROWTH = 0.03
SETTINGS = {
    "WAVELANE_ENGINE__SLOTS": str(SLOTS),
    "WAVELANE_ENGINE__CPU_CORES": "1",
    "WAVELANE_ADMISSION__MAX_QUEUED_REQUESTS": str(MAX_QUEUED),
    # Small, so that the warm-up has touched every page of it and requests compete for blocks.
    "WAVELANE_KV__POOL": "{blocks: 384}",
    "WAVELANE_HTTP__SEND_TIMEOUT_S": "5",
    "WAVELANE_TELEMETRY__REQUEST_LOG": "false",
}


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
        "load_average": os.getloadavg(),
        "answers": {f"{kind} {end}": count for (kind, end), count in sorted(clients.seen.items())},
        "num_faults": len(clients.faults),
        "faults": [f"{fault.kind}: {fault.what}" for fault in clients.faults[:20]],
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
