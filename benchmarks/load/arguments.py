"""The command line of the load tool."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.load.summary import Slo
from runners.simulation.trace import Lengths

EPILOG = """examples:
  python -m benchmarks.load --base-url http://127.0.0.1:3000 --pattern burst --load 64 --prompt-tokens 23
  python -m benchmarks.load --base-url ours=http://127.0.0.1:3000 --base-url peer=http://127.0.0.1:8000 \\
      --pattern closed --load 1,8,64 --report report.html
  python -m benchmarks.load --base-url http://127.0.0.1:3000 --pattern poisson --load 2,4,8 --duration 30 \\
      --prompt-tokens 20-2000 --output-tokens 16-256 --slo ttft_ms=200,tpot_ms=20
  python -m benchmarks.load --base-url http://127.0.0.1:3000 --pattern trace --trace arrivals.jsonl
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load",
        description="Load OpenAI-compatible servers, one or several in turn; say what clients would have seen.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target = parser.add_argument_group("servers")
    target.add_argument("--base-url", action="append", required=True, metavar="[NAME=]URL", help="may be repeated")
    target.add_argument("--model", default="", help="default: the first that /v1/models lists")
    target.add_argument("--api-key", default="", help="sent as a bearer token")
    target.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="for one request (default 600)")

    when = parser.add_argument_group("when requests go out")
    when.add_argument("--pattern", choices=("burst", "closed", "poisson", "trace"), default="closed")
    when.add_argument(
        "--load",
        type=_numbers,
        default=[],
        metavar="N[,N…]",
        help="burst: requests at once; closed: clients; poisson: requests a second; trace: speed-up. One case for each",
    )
    when.add_argument("--requests", type=_count, default=0, metavar="N", help="a case (default: 3 × load, at least 32)")
    when.add_argument("--duration", type=_seconds, default=0.0, metavar="S", help="poisson: arrivals for so long")
    when.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines: at_s, prompt_tokens, output_tokens, session"
    )
    when.add_argument("--warmup", type=_count, default=0, metavar="N", help="requests sent first and not counted")

    what = parser.add_argument_group("what is sent")
    what.add_argument("--input", choices=("ids", "text", "chat"), default="ids", help="default ids")
    what.add_argument(
        "--prompt-tokens", type=_lengths, default=Lengths(128, 128), metavar="N|LOW-HIGH", help="words, for text"
    )
    what.add_argument("--output-tokens", type=_lengths, default=Lengths(128, 128), metavar="N|LOW-HIGH")
    what.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N", help="tokens at the head of every prompt that agree"
    )
    what.add_argument("--turns", type=int, default=1, metavar="N", help="turns of a conversation (closed)")
    what.add_argument("--sessions", action="store_true", help="keep conversations in the server (session_id)")
    what.add_argument("--id-range", type=_range, default=(1000, 30_000), metavar="LOW-HIGH", help="default 1000-30000")
    what.add_argument("--seed", type=int, default=1)
    what.add_argument("--stop-at-eos", action="store_true", help="do not send ignore_eos")
    what.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="more fields for every request")

    out = parser.add_argument_group("results")
    out.add_argument(
        "--slo", type=_slo, metavar="ttft_ms=200,tpot_ms=20", help="also: itl_p99_ms, e2e_ms; gives goodput"
    )
    out.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, one a case (also on standard output)")
    out.add_argument("--per-request", type=Path, metavar="FILE", help="JSON lines, one a request")
    out.add_argument("--report", type=Path, metavar="FILE.html", help="one self-contained page with curves")
    out.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _numbers(text: str) -> list[float]:
    numbers = [float(part) for part in text.split(",")]
    if not all(0 < number < 1e6 for number in numbers):
        raise argparse.ArgumentTypeError("loads are positive numbers below a million")
    return numbers


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write seconds, above 0")
    return seconds


def _count(text: str) -> int:
    count = int(text)
    if not 0 < count < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is no count: write a whole number above 0")
    return count


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _range(text: str) -> tuple[int, int]:
    lengths = _lengths(text)
    return lengths.low, lengths.high + 1


def _slo(text: str) -> Slo:
    try:
        return Slo.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _object(text: str) -> dict[str, object]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError("a JSON object is needed")
    return fields
