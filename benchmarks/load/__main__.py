"""Run the cases: each load on each server in turn."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from tqdm import tqdm

from benchmarks.load.arguments import build_parser
from benchmarks.load.http_stream import Server
from benchmarks.load.patterns import Driver
from benchmarks.load.records import Record
from benchmarks.load.report import write_report
from benchmarks.load.summary import Case
from benchmarks.load.workload import Request, Workload, from_arrivals
from runners.errors import StartupError
from runners.simulation.trace import poisson, read_trace

MIN_REQUESTS = 32
BUSY_CLIENT = 0.7
DEFAULT_LOADS = {"burst": [64.0], "closed": [1.0, 8.0, 64.0], "poisson": [1.0], "trace": [1.0]}


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """`URL` or `NAME=URL`."""
        name, equals, url = text.partition("=")
        return cls(name, url) if equals and "://" not in name else cls(text, text)


def planned(options: argparse.Namespace, load: float) -> list[Request]:
    """The requests of a case, the same for every server. StartupError for a trace that cannot be read."""
    if options.pattern == "trace":
        return from_arrivals(read_trace(options.trace), load)
    seed = options.seed
    if options.pattern == "poisson":
        count = options.requests or max(1, round(load * options.duration)) if options.duration else options.requests
        return from_arrivals(poisson(load, count or MIN_REQUESTS, options.prompt_tokens, options.output_tokens, seed))
    count = options.requests or max(MIN_REQUESTS, 3 * int(load))
    if options.pattern == "burst":
        count = max(1, count // int(load)) * int(load)
    generator = random.Random(seed)
    return [
        Request(
            index,
            None,
            options.prompt_tokens.draw(generator),
            options.output_tokens.draw(generator),
            f"c{index // options.turns}" if options.turns > 1 else None,
        )
        for index in range(count)
    ]


async def first_model(server: Server) -> str:
    """StartupError when the server does not answer or lists none."""
    exchange = await server.exchange("/v1/models", b"", "GET")
    if exchange.error is not None or exchange.status != 200:
        raise StartupError(f"{server.base_url}/v1/models: {exchange.error or f'HTTP {exchange.status}'}")
    try:
        return str(json.loads(exchange.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise StartupError(f"{server.base_url}/v1/models lists no model") from error


async def run_case(options: argparse.Namespace, target: Target, load: float) -> Case:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    server = Server(target.url, headers, options.timeout)
    try:
        model = options.model or await first_model(server)
        if options.warmup:
            await _warm_up(options, server, model, load)
        requests = planned(options, load)
        with tqdm(total=len(requests), unit="req", desc=f"{target.name} {load:g}", disable=options.quiet) as bar:
            failed = 0

            def on_record(record: Record) -> None:
                nonlocal failed
                failed += not record.ok
                bar.update()
                if failed:
                    bar.set_postfix(failed=failed, refresh=False)

            driver = Driver(server, _workload(options, model, f"{load:g}-"), on_record)
            cpu_s = time.process_time()
            records, wall_s = await _drive(driver, options.pattern, requests, load)
        return Case(
            target.name, options.pattern, load, wall_s, (time.process_time() - cpu_s) / wall_s, records, options.slo
        )
    finally:
        server.close()


async def _drive(driver: Driver, pattern: str, requests: Sequence[Request], load: float) -> tuple[list[Record], float]:
    if pattern == "burst":
        return await driver.bursts(requests, int(load))
    if pattern == "closed":
        return await driver.closed(requests, int(load))
    return await driver.timed(requests)


async def _warm_up(options: argparse.Namespace, server: Server, model: str, load: float) -> None:
    generator = random.Random(options.seed)
    lengths = options.prompt_tokens, options.output_tokens
    requests = [Request(i, None, *(length.draw(generator) for length in lengths)) for i in range(options.warmup)]
    clients = int(load) if options.pattern in ("burst", "closed") else 8
    driver = Driver(server, _workload(options, model, "warm-"), lambda record: None)
    await driver.closed(requests, max(1, min(clients, options.warmup)))


def _workload(options: argparse.Namespace, model: str, tag: str) -> Workload:
    return Workload(
        options.input,
        model,
        options.id_range,
        options.shared_prefix,
        options.seed,
        not options.stop_at_eos,
        options.sessions,
        options.extra_body,
        tag,
    )


async def run(options: argparse.Namespace) -> list[Case]:
    cases = []
    for load in options.load or DEFAULT_LOADS[options.pattern]:
        for text in options.base_url:
            case = await run_case(options, Target.parse(text), load)
            cases.append(case)
            line = json.dumps(case.to_json())
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(line + "\n")
            if options.per_request:
                _write_requests(options.per_request, case)
            if case.client_cpu > BUSY_CLIENT:
                print(
                    f"warning: this tool used {case.client_cpu:.0%} of a core: the figures may be its own",
                    file=sys.stderr,
                )
    return cases


def _write_requests(path: Path, case: Case) -> None:
    with path.open("a") as out:
        for record in case.records:
            fields = {
                "server": case.server,
                "load": case.load,
                "index": record.request.index,
                "sent_at_s": round(record.sent_at, 6),
                "token_ms": [round(1000 * at_s, 3) for at_s in record.token_at_s],
                "e2e_ms": round(1000 * record.e2e_s, 3),
                "prompt_tokens": record.prompt_tokens,
                "output_tokens": record.output_tokens,
                "finish_reason": record.finish_reason,
                "error": record.error,
            }
            out.write(json.dumps(fields) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every request was served; 1 when one failed; 2 when the run could not be started."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if (options.pattern == "trace") != (options.trace is not None):
        parser.error("--trace FILE goes with --pattern trace")
    if options.pattern in ("burst", "closed") and any(load != int(load) for load in options.load):
        parser.error("bursts and clients are whole numbers")
    if options.turns < 1 or (options.turns > 1 and options.pattern != "closed"):
        parser.error("--turns goes with --pattern closed; a trace names its own sessions")
    try:
        cases = uvloop.run(run(options))
        if options.report:
            write_report(options.report, cases, " ".join(sys.argv[1:] if arguments is None else arguments))
    except (StartupError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if any(len(case.good) < len(case.records) for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
