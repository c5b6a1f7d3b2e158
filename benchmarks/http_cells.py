"""A server under bursts of equal requests: `python -m benchmarks.http_cells --model NAME --cells 1x23,64x128`.

Works with any OpenAI-compatible server: `/v1/completions`, prompts of random token ids, streamed, greedy, `ignore_eos`.
A burst sends all requests of a cell at once and waits for the last. One JSON line a cell, with the fields that
`benchmarks.compare` reads: ttft_ms_* over all requests of all bursts (`ttft_ms_each`: mean and maximum of each burst),
decode_ms_step the median gap between tokens of one request while no prompt is under way, out_tok_s the median over
the long bursts. `--short-bursts` more of `--short-tokens` each count for TTFT only.

`--poisson RATE[,RATE …] --seconds S` instead: requests of mixed lengths (prompts 20–2000, outputs 16–256, log-uniform)
at that many a second; goodput is the share of requests with TTFT and mean gap within the limits. `--saturate` keeps 64
of them under way and reports the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

Cell = tuple[int, int]
ID_RANGE = (1000, 127000)


@dataclass(slots=True)
class Exchange:
    """One streamed completion: when it was sent, when each event arrived [seconds of the performance counter]."""

    sent: float = 0.0
    events: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        return (self.events[0] - self.sent) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in itertools.pairwise(self.events)]

    @property
    def mean_gap_ms(self) -> float:
        return (self.events[-1] - self.events[0]) * 1e3 / max(1, self.num_tokens - 1)


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; reads a stream of server-sent events with as little work an event as can be."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._tail = b""
        self._exchange = Exchange()
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(f"connection lost: {error}")

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        text = self._tail + data
        end = text.rfind(b"\n") + 1
        self._tail = text[end:]
        lines = text[:end].split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                # The closing event of some servers has usage and no choice; an empty one after the last token counts
                # as no token, since both servers are asked for usage.
                if b'"choices":[]' in line:
                    usage = json.loads(line[6:])["usage"]
                    self._exchange.num_tokens = usage["completion_tokens"]
                elif b'"error"' in line[:20]:
                    self._exchange.error = line.decode()
                else:
                    self._exchange.events.append(now)
            elif line.startswith(b"data: [DONE]"):
                self._finish("")
            elif line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200"):
                self._finish(line.decode())

    def _finish(self, error: str) -> None:
        if self._done is not None and not self._done.done():
            self._exchange.error = self._exchange.error or error
            self._done.set_result(None)

    def send(self, head: bytes, body: bytes) -> tuple[Exchange, asyncio.Future[None]]:
        assert self.transport is not None
        self._exchange = Exchange()
        self._tail = b""
        self._done = asyncio.get_running_loop().create_future()
        self._exchange.sent = time.perf_counter()
        self.transport.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return self._exchange, self._done


class Client:
    """Keeps connections for reuse; a server that closes one after a stream gets a new one."""

    def __init__(self, base_url: str, model: str) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n".encode()
        )
        self._model = model
        self._free: list[Connection] = []

    async def warm(self, count: int) -> None:
        """Have `count` connections open, so that a burst does not wait for any."""
        self._free = [each for each in self._free if each.transport and not each.transport.is_closing()]
        while len(self._free) < count:
            self._free.append(await self._connect())

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port)
        return connection

    def body(self, prompt: Sequence[int], max_tokens: int) -> bytes:
        return json.dumps(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    async def complete(self, body: bytes) -> Exchange:
        connection = None
        while self._free and connection is None:
            candidate = self._free.pop()
            if candidate.transport is not None and not candidate.transport.is_closing():
                connection = candidate
        if connection is None:
            connection = await self._connect()
        exchange, done = connection.send(self._head, body)
        await done
        if not exchange.error:
            self._free.append(connection)
        return exchange


def random_prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(*ID_RANGE) for _ in range(length)]


async def burst(client: Client, bodies: Sequence[bytes]) -> tuple[list[Exchange], float]:
    """(exchanges, seconds until the last one ended)."""
    await client.warm(len(bodies))
    started = time.perf_counter()
    done = list(await asyncio.gather(*(client.complete(body) for body in bodies)))
    failed = [exchange.error for exchange in done if exchange.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(done)} requests failed: {failed[0]}")
    return done, time.perf_counter() - started


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(percent / 100 * (len(ordered) - 1))))] if ordered else math.nan


def undisturbed_gaps(exchanges: Sequence[Exchange]) -> list[float]:
    """Gaps between tokens after every request of the burst has its first one, and before any has its last [ms]."""
    start = max(exchange.events[0] for exchange in exchanges)
    end = min(exchange.events[-1] for exchange in exchanges)
    return [
        (after - before) * 1e3
        for exchange in exchanges
        for before, after in itertools.pairwise(exchange.events)
        if before >= start and after <= end
    ]


async def run_cell(client: Client, cell: Cell, arguments: argparse.Namespace) -> dict[str, Any]:
    batch, length = cell
    draw = random.Random(f"{arguments.seed}:{batch}:{length}")

    async def one(max_tokens: int) -> tuple[list[Exchange], float]:
        bodies = [client.body(random_prompt(draw, length), max_tokens) for _ in range(batch)]
        gc.collect()
        found = await burst(client, bodies)
        await asyncio.sleep(arguments.pause_s)
        return found

    for _ in range(arguments.warmup):
        await one(arguments.short_tokens)
    bursts = arguments.bursts if batch * length < arguments.heavy_tokens else arguments.heavy_bursts
    short = arguments.short_bursts if batch * length < arguments.heavy_tokens else 0
    longs = [await one(arguments.max_tokens) for _ in range(bursts)]
    shorts = [await one(arguments.short_tokens) for _ in range(short)]
    ttft = [[exchange.ttft_ms for exchange in done] for done, _ in (*longs, *shorts)]
    gaps = [gap for done, _ in longs for exchange in done for gap in exchange.gaps_ms]
    flat = [each for one_burst in ttft for each in one_burst]
    steps = [gap for done, _ in longs for gap in undisturbed_gaps(done)]
    rates = [sum(exchange.num_tokens for exchange in done) / wall for done, wall in longs]
    short_of = sum(exchange.num_tokens != arguments.max_tokens for done, _ in longs for exchange in done)
    return {
        "label": arguments.label,
        "batch": batch,
        "prompt_len": length,
        "max_tokens": arguments.max_tokens,
        "bursts": len(ttft),
        "rep": 0,
        "ttft_ms_mean": round(statistics.mean(flat), 3),
        "ttft_ms_p50": round(percentile(flat, 50), 3),
        "ttft_ms_max": round(max(flat), 3),
        "ttft_ms_each": [[round(statistics.mean(each), 2), round(max(each), 2)] for each in ttft],
        "decode_ms_step": round(statistics.median(steps), 4) if steps else None,
        "itl_ms_p50": round(percentile(gaps, 50), 4),
        "itl_ms_p99": round(percentile(gaps, 99), 3),
        "out_tok_s": round(statistics.median(rates), 1),
        "out_tok_s_each": [round(rate, 1) for rate in rates],
        "short_requests": short_of,
    }


def log_uniform(draw: random.Random, low: int, high: int) -> int:
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def mixed_bodies(client: Client, draw: random.Random, count: int) -> list[bytes]:
    return [
        client.body(random_prompt(draw, log_uniform(draw, 20, 2000)), log_uniform(draw, 16, 256)) for _ in range(count)
    ]


def poisson_summary(
    label: str, rate: float, done: Sequence[Exchange], wall_s: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    answered = [exchange for exchange in done if not exchange.error]
    good = [
        exchange
        for exchange in answered
        if exchange.ttft_ms <= arguments.ttft_limit_ms and exchange.mean_gap_ms <= arguments.itl_limit_ms
    ]
    gaps = [gap for exchange in answered for gap in exchange.gaps_ms]
    ttft = [exchange.ttft_ms for exchange in answered]
    return {
        "label": label,
        "rate": round(rate, 3),
        "requests": len(done),
        "failed": len(done) - len(answered),
        "goodput": round(len(good) / len(done), 4),
        "good_req_s": round(len(good) / wall_s, 3),
        "ttft_ms_mean": round(statistics.mean(ttft), 2),
        "ttft_ms_p50": round(percentile(ttft, 50), 2),
        "ttft_ms_p99": round(percentile(ttft, 99), 2),
        "itl_ms_p50": round(percentile(gaps, 50), 3),
        "itl_ms_p99": round(percentile(gaps, 99), 3),
        "tpot_ms_p50": round(percentile([exchange.mean_gap_ms for exchange in answered], 50), 3),
        "tpot_ms_p99": round(percentile([exchange.mean_gap_ms for exchange in answered], 99), 3),
        "out_tok_s": round(sum(exchange.num_tokens for exchange in answered) / wall_s, 1),
        "wall_s": round(wall_s, 2),
    }


async def run_poisson(client: Client, rate: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Requests arrive for `--seconds`; the last ones are waited for."""
    draw = random.Random(f"{arguments.seed}:{rate:.3f}")
    moments = list(itertools.takewhile(lambda at: at < arguments.seconds, arrivals(draw, rate)))
    bodies = mixed_bodies(client, draw, len(moments))
    await client.warm(64)
    gc.collect()
    started = time.perf_counter()

    async def send(at: float, body: bytes) -> Exchange:
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        return await client.complete(body)

    done = list(await asyncio.gather(*(send(at, body) for at, body in zip(moments, bodies, strict=True))))
    return poisson_summary(arguments.label, rate, done, time.perf_counter() - started, arguments)


def arrivals(draw: random.Random, rate: float) -> Any:
    at = 0.0
    while True:
        at += draw.expovariate(rate)
        yield at


async def run_saturated(client: Client, arguments: argparse.Namespace) -> dict[str, Any]:
    """64 under way at any time; requests a second from when the first have ended until the time is over."""
    draw = random.Random(f"{arguments.seed}:saturate")
    bodies = iter(mixed_bodies(client, draw, round(120 * arguments.seconds)))
    await client.warm(64)
    started = time.perf_counter()
    done: list[Exchange] = []

    async def worker() -> None:
        while time.perf_counter() - started < arguments.seconds:
            done.append(await client.complete(next(bodies)))

    await asyncio.gather(*(worker() for _ in range(64)))
    ends = sorted(exchange.events[-1] for exchange in done)
    inside = [end for end in ends if started + 2 <= end <= started + arguments.seconds]
    rate = len(inside) / (arguments.seconds - 2)
    return poisson_summary(f"{arguments.label} saturated", rate, done, time.perf_counter() - started, arguments)


async def run(arguments: argparse.Namespace) -> None:
    client = Client(arguments.base_url, arguments.model)
    gc.disable()
    if arguments.saturate:
        print(json.dumps(await run_saturated(client, arguments)), flush=True)
    for rate in arguments.poisson:
        print(json.dumps(await run_poisson(client, rate, arguments)), flush=True)
    for cell in arguments.cells:
        print(json.dumps(await run_cell(client, cell, arguments)), flush=True)


def cells(text: str) -> list[Cell]:
    return [(int(batch), int(length)) for batch, _, length in (cell.partition("x") for cell in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:3000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--label", default="")
    parser.add_argument("--cells", type=cells, default=[], help="requests x prompt tokens, separated by commas")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--bursts", type=int, default=4)
    parser.add_argument("--short-bursts", type=int, default=16)
    parser.add_argument("--short-tokens", type=int, default=8)
    parser.add_argument("--heavy-tokens", type=int, default=100_000, help="a cell of more prompt tokens is heavy …")
    parser.add_argument("--heavy-bursts", type=int, default=5, help="… and gets this many bursts, none of them short")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--pause-s", type=float, default=0.05)
    parser.add_argument("--poisson", type=lambda text: [float(rate) for rate in text.split(",")], default=[])
    parser.add_argument("--saturate", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ttft-limit-ms", type=float, default=200.0)
    parser.add_argument("--itl-limit-ms", type=float, default=20.0)
    parser.add_argument("--seed", default="1")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
