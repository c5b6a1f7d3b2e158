"""The client that compares servers by bursts: what it takes for a token, a gap, a good answer."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.http_cells import Client, Connection, Exchange, cells, poisson_summary, undisturbed_gaps


def event(text: str) -> bytes:
    data = b'data: {"choices":[{"index":0,"text":"%s"}]}\n\n' % text.encode()
    return b"%x\r\n" % len(data) + data + b"\r\n"


class Wire:
    """A transport that only remembers."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data


async def test_events_are_counted_wherever_the_network_cuts_them() -> None:
    usage = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + event("a") + event("b") + event("c") + usage
    answer += b"data: [DONE]\n\n"
    for size in (1, 7, 1000):
        connection = Connection()
        connection.transport = Wire()  # type: ignore[assignment]
        exchange, done = connection.send(b"POST / HTTP/1.1\r\n", b"{}")
        for start in range(0, len(answer), size):
            connection.data_received(answer[start : start + size])
        await done
        assert (len(exchange.events), exchange.num_tokens, exchange.error) == (3, 3, "")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Service Unavailable\r\n", b'data: {"error":{"message":"no"}}\n\n'])
async def test_a_refusal_and_an_error_event_are_errors(answer: bytes) -> None:
    connection = Connection()
    connection.transport = Wire()  # type: ignore[assignment]
    exchange, done = connection.send(b"POST / HTTP/1.1\r\n", b"{}")
    connection.data_received(answer + b"data: [DONE]\n\n")
    await done
    assert exchange.error


def test_gaps_count_between_the_last_first_token_and_the_first_end() -> None:
    first = Exchange(0.0, [1.0, 1.5, 2.0, 2.5])
    second = Exchange(0.0, [1.4, 1.9, 2.4, 2.9])
    # From 1.4 to 2.5: 1.5→2.0, 2.0→2.5 of the first, 1.4→1.9, 1.9→2.4 of the second.
    assert undisturbed_gaps([first, second]) == pytest.approx([500.0] * 4)


def test_goodput_counts_requests_within_both_limits() -> None:
    limits = argparse.Namespace(ttft_limit_ms=200.0, itl_limit_ms=20.0)
    good = Exchange(0.0, [0.1, 0.11, 0.12], 3)
    late = Exchange(0.0, [0.3, 0.31, 0.32], 3)
    slow = Exchange(0.0, [0.1, 0.2, 0.3], 3)
    failed = Exchange(0.0, [], 0, "HTTP/1.1 503")
    summary = poisson_summary("x", 2.0, [good, late, slow, failed], 2.0, limits)
    assert (summary["goodput"], summary["good_req_s"], summary["failed"]) == (0.25, 0.5, 1)


def test_cells_and_bodies() -> None:
    assert cells("1x23,64x128") == [(1, 23), (64, 128)]
    body = Client("http://127.0.0.1:9", "m").body([5, 6], 7)
    assert b'"prompt": [5, 6]' in body
    assert b'"max_tokens": 7' in body
