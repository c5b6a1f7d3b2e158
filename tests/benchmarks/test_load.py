"""The load tool: what it sends, how it reads streams, and whole runs against the canned server."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load.__main__ import main, planned
from benchmarks.load.arguments import build_parser
from benchmarks.load.http_stream import Exchange, Server
from benchmarks.load.patterns import Driver
from benchmarks.load.records import Record, read
from benchmarks.load.summary import Case, Slo, percentile
from benchmarks.load.workload import Request, Workload, from_arrivals
from runners.simulation.trace import Arrival

ROOT = Path(__file__).resolve().parents[2]
REQUEST = Request(0, None, 5, 3)


def sse(*events: dict[str, Any] | str) -> bytes:
    return b"".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode() for event in events)


def token(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}}


def answered(*reads: tuple[float, bytes], status: int = 200) -> Exchange:
    return Exchange(sent_at=10.0, status=status, reads=list(reads), ended_at=reads[-1][0] if reads else 10.0)


def record(ttft_s: float, gap_s: float, tokens: int = 3) -> Record:
    at_s = [ttft_s + gap_s * number for number in range(tokens)]
    return Record(REQUEST, 0.0, 0.0, at_s, at_s[-1], 5, tokens, "length", "", [], None)


class TestRead:
    def test_an_event_is_stamped_when_its_last_byte_has_come(self) -> None:
        first, second = sse(token("a")), sse(token("b"), token("c", "length"), usage(3), "[DONE]")
        seen = read(REQUEST, answered((10.5, first[:20]), (11.0, first[20:]), (12.0, second)))
        assert seen.ok
        assert seen.token_at_s == [1.0, 2.0, 2.0]
        assert (seen.text, seen.output_tokens, seen.prompt_tokens) == ("abc", 3, 5)
        assert (seen.finish_reason, seen.ttft_s, seen.tpot_s, seen.gaps_s) == ("length", 1.0, 0.5, [1.0, 0.0])

    def test_a_chat_begins_with_its_first_content(self) -> None:
        opening, rest = sse(delta(role="assistant", content="")), sse(delta(content="Hi"), delta("stop"), "[DONE]")
        seen = read(REQUEST, answered((10.1, opening), (10.4, rest)))
        assert seen.ttft_s == pytest.approx(0.4)
        assert seen.text == "Hi"

    def test_a_closing_event_without_a_token_is_none(self) -> None:
        body = sse(token("a"), token("b"), token("", "stop"), usage(2), "[DONE]")
        assert len(read(REQUEST, answered((11.0, body))).token_at_s) == 2

    def test_an_end_of_sequence_token_without_text_is_one(self) -> None:
        body = sse(token("a"), token("b"), token("", "stop"), usage(3), "[DONE]")
        assert len(read(REQUEST, answered((11.0, body))).token_at_s) == 3

    @pytest.mark.parametrize(
        ("exchange", "words"),
        [
            (answered((11.0, b'{"error": "full"}'), status=429), "HTTP 429"),
            (answered((11.0, sse(token("a"), {"error": {"message": "engine died"}}))), "engine died"),
            (answered((11.0, sse(token("a")))), "without [DONE]"),
            (answered((11.0, sse("[DONE]"))), "no token"),
            (answered((11.0, sse("{no json"))), "no JSON"),
            (Exchange(sent_at=1.0, error="connection refused"), "refused"),
        ],
    )
    def test_what_went_wrong_is_said(self, exchange: Exchange, words: str) -> None:
        seen = read(REQUEST, exchange)
        assert not seen.ok
        assert words in str(seen.error)


class TestSummary:
    def test_percentiles_lie_between_values(self) -> None:
        assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
        assert percentile([7.0], 99) == 7.0
        assert percentile([], 50) is None

    def test_goodput_counts_requests_within_every_bound(self) -> None:
        slo = Slo.parse("ttft_ms=200, tpot_ms=20")
        records = [record(0.1, 0.01), record(0.3, 0.01), record(0.1, 0.03)]
        failed = record(0.1, 0.01)
        failed.error = "HTTP 500"
        case = Case("a", "closed", 4.0, 2.0, 0.1, [*records, failed], slo)
        assert [slo.is_met(one) for one in case.records] == [True, False, False, False]
        fields = case.to_json()
        assert (fields["slo_met"], fields["goodput_req_s"]) == (0.25, 0.5)
        assert (fields["ok"], fields["failed"], fields["output_tokens"]) == (3, 1, 9)
        assert fields["errors"] == {"HTTP 500": 1}

    @pytest.mark.parametrize("text", ["ttft=200", "ttft_ms", "", "ttft_ms=fast"])
    def test_a_wrong_slo_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError):
            Slo.parse(text)

    def test_a_case_without_an_answer_has_figures_too(self) -> None:
        failed = record(0.1, 0.1)
        failed.error = "no"
        assert Case("a", "burst", 1.0, 1.0, 0.0, [failed]).to_json()["ttft_ms_p50"] is None


class TestWorkload:
    def test_the_seed_decides(self) -> None:
        bodies = [Workload("ids", "m", seed=seed).body(REQUEST) for seed in (1, 1, 2)]
        assert bodies[0] == bodies[1] != bodies[2]
        assert json.loads(bodies[0])["ignore_eos"] is True

    def test_a_shared_prefix_begins_every_prompt_and_is_all_they_share(self) -> None:
        workload = Workload("ids", "m", shared_prefix=4)
        first, second = (json.loads(workload.body(Request(i, None, 10, 3)))["prompt"] for i in (1, 2))
        assert first[:4] == second[:4]
        assert first[4:] != second[4:]
        assert len(first) == 10

    def test_a_turn_carries_the_history(self) -> None:
        workload = Workload("chat", "m")
        turns = [Request(i, None, 4, 3, "c") for i in (0, 1)]
        workload.body(turns[0])
        workload.answered(turns[0], "An answer.", [])
        roles = [message["role"] for message in json.loads(workload.body(turns[1]))["messages"]]
        assert roles == ["user", "assistant", "user"]

    def test_a_session_sends_the_new_part_only(self) -> None:
        workload = Workload("ids", "m", keeps_sessions=True, run_tag="r-")
        turns = [Request(i, None, 4, 3, "c") for i in (0, 1)]
        workload.body(turns[0])
        workload.answered(turns[0], "", [7, 8, 9])
        body = json.loads(workload.body(turns[1]))
        assert (len(body["prompt"]), body["session_id"]) == (4, "r-c")

    def test_ids_of_an_answer_are_part_of_the_next_prompt(self) -> None:
        workload = Workload("ids", "m")
        turns = [Request(i, None, 4, 3, "c") for i in (0, 1)]
        workload.body(turns[0])
        workload.answered(turns[0], "", [7, 8, 9])
        assert json.loads(workload.body(turns[1]))["prompt"][4:7] == [7, 8, 9]

    def test_a_trace_of_conversations_becomes_new_tokens(self) -> None:
        arrivals = [Arrival(0.0, 10, 5, "s"), Arrival(2.0, 30, 5, "s"), Arrival(3.0, 8, 4)]
        requests = from_arrivals(arrivals, speed=2.0)
        assert [request.prompt_tokens for request in requests] == [10, 15, 8]
        assert [request.at_s for request in requests] == [0.0, 1.0, 1.5]

    def test_every_case_of_a_burst_is_whole_bursts(self) -> None:
        options = build_parser().parse_args(["--base-url", "http://x", "--pattern", "burst", "--requests", "50"])
        assert len(planned(options, 16.0)) == 48


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def canned() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.load.canned_server", "--port", str(port), "--step-ms", "1"]
    server = subprocess.Popen(command, cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class TestRuns:
    def test_two_servers_side_by_side_with_a_report(self, canned: str, tmp_path: Path) -> None:
        out, page, rows = tmp_path / "out.jsonl", tmp_path / "report.html", tmp_path / "rows.jsonl"
        arguments = [
            "--base-url",
            f"one={canned}",
            "--base-url",
            f"two={canned}",
            "--pattern",
            "closed",
            "--load",
            "1,4",
        ]
        arguments += ["--requests", "12", "--output-tokens", "5-9", "--slo", "ttft_ms=60000", "--quiet"]
        assert main([*arguments, "--out", str(out), "--per-request", str(rows), "--report", str(page)]) == 0
        cases = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(case["server"], case["load"]) for case in cases] == [("one", 1), ("two", 1), ("one", 4), ("two", 4)]
        for case in cases:
            assert (case["ok"], case["failed"], case["short_answers"], case["tokens_per_event"]) == (12, 0, 0, 1.0)
            assert case["slo_met"] == 1.0
        assert cases[0]["output_tokens"] == cases[1]["output_tokens"]
        assert len(rows.read_text().splitlines()) == 48
        html = page.read_text()
        assert not re.search(r'(?:src|href|url\()\s*=?\s*["\']?\s*(?:https?:)?//', html)
        drawings = re.findall(r"<svg viewBox.*?</svg>", html, re.DOTALL)
        assert len(drawings) == 4 + 1 + 2 * 4
        for drawing in drawings:
            ElementTree.fromstring(drawing)

    @pytest.mark.parametrize(
        "pattern",
        [
            ["--pattern", "burst", "--load", "8", "--requests", "16"],
            ["--pattern", "poisson", "--load", "200", "--duration", "0.1", "--input", "text"],
            ["--pattern", "closed", "--load", "3", "--requests", "12", "--turns", "4", "--input", "chat"],
        ],
    )
    def test_patterns(self, canned: str, pattern: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--base-url", canned, "--output-tokens", "3", "--warmup", "2", "--quiet", *pattern]) == 0
        case = json.loads(capsys.readouterr().out)
        assert case["ok"] == case["requests"] > 10
        assert case["output_tokens"] == 3 * case["ok"]

    def test_a_trace(self, canned: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trace = tmp_path / "trace.jsonl"
        lines = [
            {"at_s": 0.01 * i, "prompt_tokens": 5 + 9 * i, "output_tokens": 2 + i, "session": "s"} for i in range(4)
        ]
        trace.write_text("\n".join(map(json.dumps, lines)))
        assert main(["--base-url", canned, "--pattern", "trace", "--trace", str(trace), "--quiet"]) == 0
        assert json.loads(capsys.readouterr().out)["output_tokens"] == 2 + 3 + 4 + 5

    def test_a_server_that_is_not_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--base-url", f"http://127.0.0.1:{free_port()}", "--quiet"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1

    @pytest.mark.parametrize(
        "wrong",
        [
            ["--load", "0"],
            ["--load", "1.5"],
            ["--requests", "0"],
            ["--warmup", "-3"],
            ["--timeout", "nan"],
            ["--timeout", "0"],
            ["--duration", "-1"],
            ["--prompt-tokens", "9-3"],
            ["--pattern", "trace"],
            ["--turns", "2", "--pattern", "burst"],
            ["--extra-body", "[]"],
            ["--slo", "speed=1"],
        ],
    )
    def test_wrong_arguments(self, wrong: list[str]) -> None:
        with pytest.raises(SystemExit) as refusal:
            main(["--base-url", "http://127.0.0.1:1", *wrong])
        assert refusal.value.code == 2


class TestConnections:
    async def test_a_kept_connection_that_the_server_closed_is_replaced(self) -> None:
        connections = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """One answer a connection, which says that it will stay open and then closes."""
            nonlocal connections
            connections += 1
            await reader.readuntil(b"\r\n\r\n")
            body = sse(token("a", "length"), "[DONE]")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.close()

        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        server = Server(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", {}, 10)
        async with listener:
            seen: list[Record] = []
            requests = [Request(i, None, 2, 1) for i in range(3)]
            await Driver(server, Workload("ids", "m"), seen.append).closed(requests, 1)
            server.close()
        assert [one.error for one in seen] == [None] * 3
        assert connections == 3

    async def test_a_stream_cut_in_the_middle_is_a_failure(self) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n" + sse(token("a")))
            await writer.drain()
            writer.close()

        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        server = Server(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", {}, 10)
        async with listener:
            exchange = await server.exchange("/v1/completions", b"{}")
        assert "in the middle" in str(exchange.error)

    async def test_a_silent_server_runs_into_the_timeout(self) -> None:
        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        listener = await asyncio.start_server(never, "127.0.0.1", 0)
        server = Server(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", {}, 0.05)
        async with listener:
            exchange = await server.exchange("/v1/completions", b"{}")
        assert "0.05 s" in str(exchange.error)

    @pytest.mark.parametrize("url", ["127.0.0.1:3000", "ftp://host", "http://"])
    def test_no_url(self, url: str) -> None:
        with pytest.raises(ValueError, match="URL"):
            Server(url, {}, 1)
