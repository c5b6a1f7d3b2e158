"""The cases as one self-contained HTML page: a table, latency against load, distributions, token timelines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.load.charts import MAX_LANES, Curve, distribution, line_chart, token_timeline
from benchmarks.load.summary import Case

_COLOURS = 6
_UNITS = {
    "burst": "requests at once",
    "closed": "clients",
    "poisson": "requests a second, sent",
    "trace": "speed of the trace",
}
# Column: (heading, field, whether less is better; None: neither).
_COLUMNS: tuple[tuple[str, str, bool | None], ...] = (
    ("tokens/s", "output_tok_s", False),
    ("requests/s", "req_s", False),
    ("TTFT mean", "ttft_ms_mean", True),
    ("p50", "ttft_ms_p50", True),
    ("p99", "ttft_ms_p99", True),
    ("max", "ttft_ms_max", True),
    ("ITL p50", "itl_ms_p50", True),
    ("p99", "itl_ms_p99", True),
    ("end to end p50", "e2e_ms_p50", True),
    ("goodput/s", "goodput_req_s", False),
    ("in SLO", "slo_met", False),
    ("failed", "failed", None),
)


def write_report(path: Path, cases: Sequence[Case], command: str) -> None:
    """Nothing is loaded from anywhere: style and curves are inside. OSError when the file cannot be written."""
    path.write_text(render(cases, command), encoding="utf-8")


def render(cases: Sequence[Case], command: str) -> str:
    servers = list(dict.fromkeys(case.server for case in cases))
    place = {server: number % _COLOURS for number, server in enumerate(servers)}
    results = [case.to_json() for case in cases]
    style = Path(__file__).with_name("report.css").read_text()
    title = f"Load report: {', '.join(servers)}"
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    legend = "".join(
        f'<li class="s{place[server]}"><svg aria-hidden="true"><rect class="dot" width="22" height="10" rx="3"/></svg>'
        f'<span style="color:var(--ink)">{escape(server)}</span></li>'
        for server in servers
    )
    sections = [
        _section("At a glance", f'<div class="table">{_table(results)}</div>'),
        _section("Against load", f'<div class="charts">{"".join(_load_curves(results, place))}</div>'),
        *(_at_load(load, [case for case in cases if case.load == load], place) for load in _loads(cases)),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body><main>'
        f"<h1>{escape(title)}</h1><p>{when}. Times in milliseconds, as a client sees them: TTFT from sending a request "
        f"to its first token, ITL between events that carry tokens.</p>"
        f"<code>python -m benchmarks.load {escape(command)}</code>"
        f'<ul class="legend">{legend}</ul>{"".join(sections)}</main></body></html>'
    )


def _loads(cases: Sequence[Case]) -> list[float]:
    return sorted({case.load for case in cases})


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(results: Sequence[dict[str, Any]]) -> str:
    """One row a case; with several servers the best of each load stands out."""
    columns = [column for column in _COLUMNS if any(column[1] in result for result in results)]
    heads = "".join(f'<th scope="col">{name}</th>' for name, _, _ in columns)
    rows = []
    ordered = sorted(results, key=lambda result: result["load"])
    for number, result in enumerate(ordered):
        rivals = [other for other in results if other["load"] == result["load"]]
        starts = number > 0 and ordered[number - 1]["load"] != result["load"]
        cells = "".join(_cell(result, rivals, field, less) for _, field, less in columns)
        name = f"{escape(str(result['server']))} · {result['load']:g}"
        rows.append(f'<tr{" class=first" if starts else ""}><th scope="row">{name}</th>{cells}</tr>')
    unit = _UNITS[str(results[0]["pattern"])]
    head = f'<tr><th scope="col">server · {unit}</th>{heads}</tr>'
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(result: dict[str, Any], rivals: Sequence[dict[str, Any]], field: str, less: bool | None) -> str:
    value = result.get(field)
    if value is None:
        return "<td>–</td>"
    if less is None:
        return f"<td{' class=bad' if value else ''}>{value}</td>"
    values = [rival[field] for rival in rivals if rival.get(field) is not None]
    is_best = len(values) > 1 and value == (min(values) if less else max(values))
    text = f"{value:.0%}" if field == "slo_met" else f"{value:,.1f}" if value >= 100 else f"{value:.2f}"
    return f"<td{' class=best' if is_best else ''}>{text}</td>"


def _load_curves(results: Sequence[dict[str, Any]], place: dict[str, int]) -> list[str]:
    unit = _UNITS[str(results[0]["pattern"])]
    log_x = max(result["load"] for result in results) > 8 * min(result["load"] for result in results)

    def chart(title: str, fields: Sequence[str], y_label: str, *, log_y: bool = False) -> str:
        curves = []
        for server, number in place.items():
            mine = sorted((r for r in results if r["server"] == server), key=lambda r: r["load"])
            for dashed, field in enumerate(fields):
                points = [(r["load"], r[field]) for r in mine if r.get(field) is not None]
                curves.append(Curve(f"{server} {field}", number, points, bool(dashed)))
        return line_chart(title, curves, unit, y_label, log_x=log_x, log_y=log_y)

    charts = [
        chart("Output tokens a second", ["output_tok_s"], "tokens/s"),
        chart("Time to first token: p50, dashed p99", ["ttft_ms_p50", "ttft_ms_p99"], "ms", log_y=True),
        chart("Inter-token latency: p50, dashed p99", ["itl_ms_p50", "itl_ms_p99"], "ms", log_y=True),
        chart("End to end: p50, dashed p99", ["e2e_ms_p50", "e2e_ms_p99"], "ms", log_y=True),
    ]
    if any("goodput_req_s" in result for result in results):
        charts.append(chart("Goodput: requests a second within the SLO", ["goodput_req_s"], "requests/s"))
    return charts


def _at_load(load: float, cases: Sequence[Case], place: dict[str, int]) -> str:
    ttft = [(case.server, place[case.server], case.ttft_ms()) for case in cases]
    itl = [(case.server, place[case.server], case.itl_ms()) for case in cases]
    figures = [distribution("Time to first token", ttft, "ms"), distribution("Inter-token latency", itl, "ms")]
    until_s = max((_last_token_s(case) for case in cases), default=0.0)
    if until_s > 0:
        figures += [token_timeline(f"Tokens of {c.server}", place[c.server], c.good, until_s) for c in cases]
    return _section(f"{load:g} {_UNITS[cases[0].pattern]}", f'<div class="charts">{"".join(figures)}</div>')


def _last_token_s(case: Case) -> float:
    """Of the requests that a timeline shows, the end of the last, from the first one's sending."""
    shown = sorted(case.good, key=lambda record: record.sent_at)[:MAX_LANES]
    if not shown:
        return 0.0
    return max(record.sent_at + record.token_at_s[-1] for record in shown) - shown[0].sent_at
