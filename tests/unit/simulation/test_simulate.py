"""The simulation: times by hand, sessions, the command, the pictures."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from configs.schema import Profile
from runners.execution.cost_model import CostModel, StepCost
from runners.scheduling.scheduler_output import PlanKind
from runners.simulate import main
from runners.simulation.drawing import Drawing, to_svg
from runners.simulation.run import Device, simulate
from runners.simulation.summary import Distribution, percentile, summarize, table
from runners.simulation.timeline import draw, spans
from runners.simulation.trace import Arrival, Lengths, burst, poisson
from tests.support.traces import write_trace

COSTS = CostModel(
    {PlanKind.DECODE: StepCost(0.004), PlanKind.WAVE: StepCost(0.008), PlanKind.MIXED: StepCost(0.010)},
    is_estimate=True,
)
DEVICE = Device(COSTS, blocks=2000)
PROFILE = Profile.model_validate({"admission": {"cold_window_us": 0}})


def test_a_burst_by_hand():
    simulation = simulate([Arrival(0.0, 20, 3)] * 4, PROFILE, DEVICE, name="p")
    summary = summarize(simulation)
    assert summary.ttft == Distribution(8, 8, 8, 8, 8)
    assert (summary.itl.p50, summary.itl.max) == (pytest.approx(4), pytest.approx(4))
    assert summary.e2e.max == pytest.approx(16)
    assert summary.output_tokens == 12
    assert summary.output_tokens_per_s == pytest.approx(12 / 0.016)
    assert summary.busy == pytest.approx(1.0)
    assert summary.steps == {"decode": 2, "wave": 1}
    assert summary.max_blocks == pytest.approx(8 / 2000)


def test_time_to_first_token_counts_from_the_arrival():
    summary = summarize(simulate([Arrival(0.0, 20, 10), Arrival(0.0095, 20, 1)], PROFILE, DEVICE))
    # Alone first: a wave's cost stands in for a single prompt. Then a step, and one held: the second at 8+4+4+8.
    assert summary.ttft.max == pytest.approx(28 - 9.5)


def test_a_session_keeps_its_kv_and_its_turns_in_order():
    arrivals = [Arrival(0.0, 40, 10, "s"), Arrival(0.001, 60, 10, "s"), Arrival(0.002, 100, 10, "s")]
    simulation = simulate(arrivals, PROFILE, DEVICE)
    first, second, third = simulation.requests
    assert second.arrived_at >= first.last_token_at
    assert third.arrived_at >= second.last_token_at
    assert [record.error for record in simulation.requests] == [None] * 3
    assert [record.cached_tokens for record in simulation.requests] == [0, 49, 69]


def test_requests_that_cannot_run_are_counted_as_failed():
    summary = summarize(simulate([Arrival(0.0, 40_000, 5), Arrival(0.0, 20, 5)], PROFILE, DEVICE))
    assert summary.failed == 1
    assert summary.output_tokens == 5


def test_a_small_pool_preempts():
    summary = summarize(simulate([Arrival(0.0, 20, 60)] * 4, PROFILE, Device(COSTS, blocks=12)))
    assert summary.preemptions > 0
    assert summary.failed == 0
    assert summary.max_blocks == 1.0


def test_the_same_trace_gives_the_same_simulation():
    arrivals = poisson(60.0, 200, Lengths(10, 500), Lengths(5, 60))
    assert summarize(simulate(arrivals, PROFILE, DEVICE)) == summarize(simulate(arrivals, PROFILE, DEVICE))


@pytest.mark.parametrize(
    ("count", "fraction", "expected"), [(100, 0.99, 99), (100, 0.5, 50), (1, 0.99, 1), (3, 0.5, 2)]
)
def test_percentiles_are_nearest_ranks(count, fraction, expected):
    assert percentile(list(range(1, count + 1)), fraction) == expected


def test_the_table_has_a_column_a_profile():
    summaries = [
        summarize(simulate(burst(3, Lengths(9, 9), Lengths(4, 4)), PROFILE, DEVICE, name=name)) for name in "ab"
    ]
    lines = table(summaries).splitlines()
    assert lines[0].split() == ["a", "b"]
    assert len({len(line) for line in lines}) == 1


# --- pictures -------------------------------------------------------------------------------------------------------


def kept(count: int = 12):
    arrivals = poisson(80.0, count, Lengths(10, 500), Lengths(5, 30))
    return simulate(arrivals, PROFILE, DEVICE, name="<balanced>", keep_steps=True)


def test_spans_cover_every_token_once():
    simulation = kept()
    found = spans(simulation, 0.0, simulation.end_s)
    decoded = sum(len(trace.plan.decode_rows) for trace in simulation.steps)
    computed = sum(len(chunk.token_ids) for trace in simulation.steps for chunk in trace.plan.chunks)
    assert sum(span.tokens for span in found) == decoded + computed
    for slot in {span.slot for span in found}:
        lane = sorted((span.start, span.end) for span in found if span.slot == slot)
        assert all(earlier[1] <= later[0] + 1e-9 for earlier, later in pairwise(lane))


def test_the_picture_escapes_what_it_shows_and_stays_on_the_page():
    drawing = draw([kept(), kept()], subtitle="a & b")
    svg = to_svg(drawing)
    assert "<balanced>" not in svg
    assert "a &amp; b" in svg
    for x, y, width, height in re.findall(r'<rect x="([-\d.]+)" y="([-\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg):
        assert 0 <= float(x) <= float(x) + float(width) <= drawing.width
        assert 0 <= float(y) <= float(y) + float(height) <= drawing.height


def test_html_needs_no_network_and_png_is_an_image(tmp_path):
    drawing = draw([kept()], subtitle="s")
    drawing.save(tmp_path / "p.html", "numbers < below")
    html = (tmp_path / "p.html").read_text()
    assert "numbers &lt; below" in html
    assert not re.findall(r'(?:src|href)="', html)
    pytest.importorskip("matplotlib")
    drawing.save(tmp_path / "p.png")
    data = (tmp_path / "p.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert (width, height) == (round(drawing.width), round(drawing.height))


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(Exception, match=r"\.html or \.png"):
        Drawing(10, 10, "t").save(tmp_path / "p.pdf")


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_draws(tmp_path, capsys):
    plot = tmp_path / "out.html"
    assert (
        main(
            [
                "--burst",
                "5",
                "--prompt-tokens",
                "23",
                "--profile",
                "balanced",
                "--profile",
                "latency",
                "--plot",
                str(plot),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "step times: one NVIDIA H200" in printed
    assert "TTFT p99 ms" in printed
    assert "latency" in plot.read_text()


def test_the_command_reads_a_trace_and_prints_json(tmp_path, capsys):
    write_trace(tmp_path / "t.jsonl", [Arrival(0.0, 20, 3), Arrival(1.0, 20, 3)])
    assert main(["--trace", str(tmp_path / "t.jsonl"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["profile"], summary["requests"], summary["output_tokens"]) == ("balanced", 2, 6)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--burst", "3", "--profile", "nonesuch"], "nonesuch"),
        (["--burst", "0"], "no request"),
        (["--poisson", "-1"], "rate"),
        (["--poisson", "inf"], "rate"),
        (["--burst", "3", "--plot", "/nowhere/x.png"], "no folder /nowhere"),
        (["--burst", "3", "--window", "5"], "--window"),
        (["--burst", "3", "--kv-blocks", "0"], "--kv-blocks"),
        (["--burst", "3", "--cost-model", "/nowhere.json"], "nowhere.json"),
        (["--trace", "/nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_a_fault_of_the_caller_is_one_line(arguments, reason, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1
