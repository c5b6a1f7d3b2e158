"""The cost of a step, its file, and the fit to measurements."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from runners.errors import StartupError
from runners.execution.cost_fit import Measurement, fit, main, read_measurements
from runners.execution.cost_model import CostModel, StepCost, StepFeatures
from runners.scheduling.scheduler_output import DecodeRow, PlanKind, PrefillChunk, StepPlan

ESTIMATE = Path(__file__).parents[3] / "configs" / "cost_models" / "h200-8b-estimate.json"


def decode_plan(rows: int, position: int, width: int | None = None) -> StepPlan:
    decode_rows = tuple(DecodeRow(f"r{row}", row, position) for row in range(rows))
    return StepPlan(1, PlanKind.DECODE, decode_rows, width=rows if width is None else width)


def prefill_plan(*pieces: tuple[int, int]) -> StepPlan:
    chunks = tuple(
        PrefillChunk(f"r{slot}", slot, start, (1,) * count, True) for slot, (start, count) in enumerate(pieces)
    )
    return StepPlan(1, PlanKind.WAVE, chunks=chunks)


def test_features_of_a_decode_step():
    assert StepFeatures.of(decode_plan(3, 99)) == StepFeatures(rows=3, context_tokens=300, attention_pairs=0)
    assert StepFeatures.of(decode_plan(3, 99, width=4)).rows == 4, "the device runs the width"


def test_features_tell_how_uneven_the_rows_of_a_step_are():
    rows = tuple(DecodeRow(f"r{slot}", slot, position) for slot, position in enumerate((9, 19, 99)))
    features = StepFeatures.of(StepPlan(1, PlanKind.DECODE, rows, width=3))
    assert features.context_tokens == 10 + 20 + 100
    assert features.uneven_tokens == 90 + 80
    assert StepFeatures.of(decode_plan(3, 99)).uneven_tokens == 0
    assert StepCost(1.0, per_uneven_token_s=0.01).seconds(features) == pytest.approx(2.7)


def test_features_of_a_prefill_count_causal_pairs():
    assert StepFeatures.of(prefill_plan((0, 4), (10, 2))) == StepFeatures(
        rows=6, context_tokens=0, attention_pairs=(1 + 2 + 3 + 4) + (11 + 12)
    )


def test_the_line_bends_at_the_knee():
    cost = StepCost(base_s=1.0, per_row_s=0.1, knee_rows=10, per_row_beyond_s=1.0, per_context_token_s=0.01)
    assert cost.seconds(StepFeatures(10, 0, 0)) == pytest.approx(2.0)
    assert cost.seconds(StepFeatures(12, 100, 0)) == pytest.approx(5.0)


def test_kinds_that_were_not_measured_cost_what_the_nearest_does():
    model = CostModel({PlanKind.DECODE: StepCost(1.0), PlanKind.WAVE: StepCost(2.0)})
    assert model.cost(PlanKind.SEQUENTIAL).base_s == 1.0
    assert model.cost(PlanKind.OVERLAP_PREFILL).base_s == 2.0
    assert model.cost(PlanKind.MIXED).base_s == 1.0
    with pytest.raises(ValueError, match="decode"):
        CostModel({PlanKind.WAVE: StepCost(2.0)})


def test_a_saved_model_loads_as_it_was(tmp_path):
    model = CostModel({PlanKind.DECODE: StepCost(1.0, 0.5, 7), PlanKind.MIXED: StepCost(2.0)}, 1.3, "by hand", True)
    model.save(tmp_path / "model.json")
    assert CostModel.load(tmp_path / "model.json") == model


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"costs": {"nothing": {}}}', '{"costs": {"decode": {"speed": 1}}}'])
def test_a_file_that_is_no_model_is_named(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(StartupError, match=r"broken\.json: no cost model"):
        CostModel.load(path)


def test_the_shipped_estimate_agrees_with_the_figures_it_comes_from():
    """The probe: 4.47 / 4.58 / 5.31 ms at 1 / 8 / 64 rows (context 190), 9.18 at 64 × 2064; prefill 40.3 + 3.8."""
    model = CostModel.load(ESTIMATE)
    assert model.is_estimate
    for rows, position, milliseconds in ((1, 189, 4.47), (8, 189, 4.58), (64, 189, 5.31), (64, 2063, 9.18)):
        assert model.step_s(decode_plan(rows, position)) * 1000 == pytest.approx(milliseconds, rel=0.02)
    assert model.step_s(prefill_plan((0, 2000))) * 1000 == pytest.approx(44.1, rel=0.05)
    assert model.step_s(prefill_plan((0, 512))) * 1000 == pytest.approx(10.4 + 0.3, rel=0.05)


# --- fit ------------------------------------------------------------------------------------------------------------

TRUE_DECODE = StepCost(4e-3, 8e-6, 0, 8e-6, 32e-9, 0.0)
TRUE_WAVE = StepCost(4e-3, 4e-6, 240, 20e-6, 0.0, 2e-9)


def measured(noise: float, seed: int = 1) -> list[Measurement]:
    generator = random.Random(seed)
    steps = []
    for _ in range(300):
        rows = generator.randint(1, 64)
        features = StepFeatures(rows, rows * generator.randint(20, 4000), 0)
        steps.append((PlanKind.DECODE, features, TRUE_DECODE))
        tokens = generator.choice([16, 64, 128, 240, 512, 1024, 2048, 8192])
        steps.append((PlanKind.WAVE, StepFeatures(tokens, 0, tokens * (tokens + 1) // 2), TRUE_WAVE))
    return [
        Measurement(kind, features, cost.seconds(features) * (1 + generator.uniform(-noise, noise)))
        for kind, features, cost in steps
    ]


def test_exact_measurements_are_recovered():
    model, errors = fit(measured(0.0), source="made up")
    assert all(error.worst < 1e-6 for error in errors)
    assert model.costs[PlanKind.WAVE].knee_rows == 240
    assert model.costs[PlanKind.WAVE].per_row_beyond_s == pytest.approx(20e-6, rel=1e-4)
    assert model.costs[PlanKind.DECODE].per_context_token_s == pytest.approx(32e-9, rel=1e-4)


def test_kinds_with_prompts_are_fitted_together():
    steps = measured(0.0)
    few = [Measurement(PlanKind.MIXED, StepFeatures(600, 0, 180_000), 4e-3 + 240 * 4e-6 + 360 * 20e-6 + 180_000 * 2e-9)]
    model, _ = fit([*steps, *few], source="made up")
    assert model.costs[PlanKind.MIXED] == model.costs[PlanKind.WAVE]
    assert model.costs[PlanKind.MIXED] != model.costs[PlanKind.DECODE]


def test_noise_is_averaged_out_and_the_held_out_error_says_so():
    _, errors = fit(measured(0.05), source="made up")
    assert {error.kind for error in errors} == {PlanKind.DECODE, PlanKind.WAVE}
    assert all(0.01 < error.mean < 0.04 for error in errors)
    assert all(error.num_held_out == 60 for error in errors)


def test_no_coefficient_is_negative():
    model, _ = fit(measured(0.5), source="made up")
    for cost in model.costs.values():
        assert min(cost.base_s, cost.per_row_s, cost.per_row_beyond_s, cost.per_context_token_s, cost.per_pair_s) >= 0


def test_one_size_of_step_gives_a_constant():
    steps = [Measurement(PlanKind.DECODE, StepFeatures(4, 0, 0), 0.005)] * 10
    model, errors = fit(steps, source="made up")
    assert model.cost(PlanKind.DECODE).seconds(StepFeatures(4, 0, 0)) == pytest.approx(0.005)
    assert errors[0].worst < 1e-9


def test_the_command_reads_fits_and_writes(tmp_path, monkeypatch, capsys):
    lines = [
        json.dumps(
            {
                "kind": step.kind.value,
                "rows": step.features.rows,
                "context_tokens": step.features.context_tokens,
                "attention_pairs": step.features.attention_pairs,
                "seconds": step.seconds,
            }
        )
        for step in measured(0.02)
    ]
    source, target = tmp_path / "steps.jsonl", tmp_path / "model.json"
    source.write_text("\n".join(lines))
    monkeypatch.setattr("sys.argv", ["cost_fit", str(source), "--output", str(target), "--source", "a test"])
    main()
    assert "held out: mean error" in capsys.readouterr().out
    model = CostModel.load(target)
    assert not model.is_estimate
    assert model.source == "a test"


def test_steps_that_the_host_held_up_are_left_out(tmp_path):
    """The second step is read late, since the third takes long to queue; the third's time begins late."""
    seconds = (0.010, 0.020, 0.002, 0.011, 0.012)
    lines = [
        {
            "case": "a",
            "kind": "decode",
            "rows": 1,
            "seconds": each,
            "schedule_ms": 0.1,
            "launch_ms": 18 if place == 2 else 1,
        }
        for place, each in enumerate(seconds)
    ]
    lines += [
        {"kind": "decode", "rows": 1, "seconds": 0.013},
        {"case": "b", "kind": "decode", "rows": 1, "seconds": 0.014},
    ]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [each.seconds for each in read_measurements(path)] == [0.010, 0.012, 0.013, 0.014]


@pytest.mark.parametrize("line", ["{", '{"kind": "decode"}', '{"kind": "sleep", "rows": 1, "seconds": 1}', "3"])
def test_a_line_that_is_no_measurement_is_named(tmp_path, line):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"kind": "decode", "rows": 1, "seconds": 0.004}\n' + line)
    with pytest.raises(StartupError, match=r"steps\.jsonl:2"):
        read_measurements(path)
