"""The search for a profile: scores, front, and that it beats the default on what it has not seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from configs.loader import load_profile
from configs.schema import Profile
from runners.execution.cost_model import CostModel
from runners.simulate import COST_MODELS
from runners.simulation.named_traces import NAMED_TRACES, steady_short
from runners.simulation.run import Device, simulate
from runners.simulation.search import (
    SPACE,
    Evaluation,
    Slo,
    Trials,
    apply,
    metric,
    pareto_front,
    search,
    simplify,
    value_of,
)
from runners.simulation.summary import summarize
from runners.simulation.trace import Lengths, poisson, split
from runners.tune import main
from tests.support.traces import write_trace

BASE = load_profile("balanced", {}).profile
# Not the measured model: what a search finds should not change with the next measurement.
DEVICE = Device(CostModel.load(COST_MODELS / "h200-8b-estimate.json"), 53_000)


def test_every_value_of_the_space_is_a_valid_profile():
    for field, values in SPACE.items():
        for value in values:
            assert value_of(apply(BASE, ((field, value),)), field) == value


def test_the_space_contains_the_base():
    assert [field for field, values in SPACE.items() if value_of(BASE, field) not in values] == []


@pytest.mark.parametrize("text", ["", "ttft=3", "ttft_p99_ms", "ttft_p99_ms=0", "ttft_p99_ms=x", "ttft_p98_ms=3"])
def test_an_slo_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        Slo.parse(text)


def test_a_missed_limit_weighs_more_than_any_gain_below_it():
    arrivals = poisson(60.0, 150, Lengths(16, 200), Lengths(16, 64))
    summary = summarize(simulate(arrivals, BASE, DEVICE))
    kept = Slo.parse(f"ttft_p99_ms={metric(summary, 'ttft_p99_ms') * 1.01},itl_p99_ms=1000")
    missed = Slo.parse(f"ttft_p99_ms={metric(summary, 'ttft_p99_ms') * 0.8},itl_p99_ms=1000")
    assert kept.score(summary, summary) < 1 < missed.score(summary, summary)


def test_lost_throughput_and_lost_requests_cost():
    base = summarize(simulate(poisson(60.0, 150, Lengths(16, 200), Lengths(16, 64)), BASE, DEVICE))
    slo = Slo.parse("ttft_p99_ms=1000")
    slower = replace(base, output_tokens_per_s=0.99 * base.output_tokens_per_s)
    faster = replace(base, output_tokens_per_s=1.01 * base.output_tokens_per_s)
    failing = replace(base, failed=1)
    assert slo.score(faster, base) == slo.score(base, base)
    assert slo.score(slower, base) == pytest.approx(slo.score(base, base) + 1.0)
    assert slo.score(failing, base) > 100


def evaluations(count: int, seed: int = 0) -> tuple[list[Evaluation], Trials]:
    train, _ = split(steady_short(100))
    slo = Slo.parse("ttft_p99_ms=15,itl_p99_ms=10")
    trials = Trials(train, BASE, DEVICE, slo)
    return list(search(trials, evaluations=count, seed=seed)), trials


def test_the_search_repeats_and_tries_nothing_twice():
    first, _ = evaluations(32)
    second, _ = evaluations(32)
    assert [e.candidate for e in first] == [e.candidate for e in second]
    assert len({e.candidate for e in first}) == len(first) == 32
    assert first[0].candidate == ()


def test_the_front_is_beaten_by_nobody():
    found, _ = evaluations(32)
    front = pareto_front(found, "ttft_p99_ms", "itl_p99_ms")
    points = [(metric(e.summary, "ttft_p99_ms"), metric(e.summary, "itl_p99_ms")) for e in front]
    assert points == sorted(points)
    for evaluation in found:
        x, y = metric(evaluation.summary, "ttft_p99_ms"), metric(evaluation.summary, "itl_p99_ms")
        assert not any(x < px and y < py for px, py in points)


def test_simplifying_keeps_the_score_and_drops_what_does_nothing():
    found, trials = evaluations(32)
    best = min(found, key=lambda e: e.score)
    idle = tuple(sorted({**dict(best.candidate), "engine.slots": 256}.items()))
    padded = Evaluation(idle, best.summary, best.score - 1e-9)
    chosen = simplify([found[0], padded], trials)
    assert chosen.score <= padded.score * 1.005 + 1e-9
    assert ("engine.slots", 256) not in chosen.candidate, "this load never needs so many"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trace", "slo"),
    [
        ("bursty-chat", "ttft_p99_ms=400,itl_p99_ms=25"),
        ("steady-short", "ttft_p99_ms=15,itl_p99_ms=10"),
    ],
)
def test_it_beats_the_default_on_the_half_it_has_not_seen(trace, slo):
    train, held_out = split(NAMED_TRACES[trace]())
    trials = Trials(train, BASE, DEVICE, Slo.parse(slo))
    starts = [load_profile(name, {}).profile for name in ("latency", "throughput")]
    chosen = simplify(list(search(trials, starts=starts, evaluations=32)), trials)
    before = summarize(simulate(held_out, BASE, DEVICE))
    after = summarize(simulate(held_out, apply(BASE, chosen.candidate), DEVICE))
    assert after.ttft.p99 <= 0.8 * before.ttft.p99
    # Both carry the whole load; what is left is how soon the last burst ends, a few steps of several seconds.
    assert after.output_tokens_per_s >= 0.995 * before.output_tokens_per_s


def test_the_command_writes_a_profile_that_loads(tmp_path, capsys):
    trace, output, plot = tmp_path / "t.jsonl", tmp_path / "mine.yaml", tmp_path / "front.html"
    write_trace(trace, steady_short(120))
    arguments = ["--trace", str(trace), "--slo", "ttft_p99_ms=15", "--evaluations", "20", "--workers", "1"]
    assert main([*arguments, "--output", str(output), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "held-out half" in printed
    text = output.read_text()
    assert text.startswith("# Found by runners.tune for ttft_p99_ms=15")
    assert yaml.safe_load(text)["preset"] == "balanced"
    assert isinstance(load_profile(str(output), {}).profile, Profile)
    assert "base profile" in plot.read_text()


def test_processes_change_nothing_but_the_time(tmp_path):
    trace = tmp_path / "t.jsonl"
    write_trace(trace, steady_short(60))
    written = []
    for workers in ("1", "2"):
        output = tmp_path / f"{workers}.yaml"
        arguments = ["--trace", str(trace), "--slo", "ttft_p99_ms=15", "--evaluations", "20", "--workers", workers]
        assert main([*arguments, "--output", str(output)]) == 0
        written.append(output.read_text())
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--trace", "/nowhere.jsonl"], "nowhere"),
        (["--trace", "steady-short", "--base", "best"], "--base best"),
        (["--trace", "steady-short", "--plot", "/nowhere/x.png"], "no folder /nowhere"),
    ],
)
def test_a_fault_of_the_caller_is_one_line(arguments, reason, capsys, tmp_path: Path):
    assert main([*arguments, "--slo", "ttft_p99_ms=15", "--output", str(tmp_path / "x.yaml")]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1
