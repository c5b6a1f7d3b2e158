from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.reference.gumbel_noise import gumbel_noise
from kernels.reference.sample import filtered_probabilities, scaled_logits

pytestmark = pytest.mark.usefixtures("implementation")


def make_params(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> ops.SamplingTensors:
    return ops.SamplingTensors(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        seeds=torch.arange(num_rows) if seeds is None else seeds,
        positions=torch.zeros(num_rows, dtype=torch.int64) if positions is None else positions,
        any_top_k=top_k > 0,
        any_top_p=top_p < 1,
        any_min_p=min_p > 0,
    )


def first_row(params: ops.SamplingTensors) -> ops.SamplingTensors:
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    return ops.SamplingTensors(*(getattr(params, name)[:1] for name in names))


def sample(logits: torch.Tensor, params: ops.SamplingTensors) -> torch.Tensor:
    return ops.sample(logits, ops.argmax(logits), params)


def probabilities_of(logits: torch.Tensor, params: ops.SamplingTensors) -> torch.Tensor:
    """Kept probabilities [n, V], renormalised."""
    kept = filtered_probabilities(scaled_logits(logits, logits.argmax(-1), params.temperature), params)
    return kept / kept.sum(-1, keepdim=True)


def kept(logits: list[float], **settings: float) -> list[int]:
    """Ids that survive the filters, for one row."""
    probabilities = probabilities_of(torch.tensor([logits]), make_params(1, **settings))  # type: ignore[arg-type]
    return probabilities[0].nonzero().flatten().tolist()


LOGITS = torch.tensor([0.5, 0.1, 0.25, 0.05, 0.1]).log().tolist()


def test_top_k_keeps_the_k_largest_and_their_equals() -> None:
    assert kept(LOGITS, top_k=1) == [0]
    assert kept(LOGITS, top_k=2) == [0, 2]
    assert kept([1.0, 0.0, 0.0, -1.0], top_k=2) == [0, 1, 2]
    assert kept(LOGITS, top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_shortest_prefix_that_reaches_it() -> None:
    assert kept(LOGITS, top_p=0.4) == [0]
    assert kept(LOGITS, top_p=0.51) == [0, 2]
    assert kept(LOGITS, top_p=0.76) == [0, 1, 2, 4]
    assert kept(LOGITS, top_p=0.999) == [0, 1, 2, 3, 4]


def test_top_p_counts_what_top_k_left() -> None:
    assert kept(LOGITS, top_k=2, top_p=0.6) == [0]
    assert kept(LOGITS, top_p=0.6) == [0, 2]


def test_min_p_is_relative_to_the_largest() -> None:
    assert kept(LOGITS, min_p=0.45) == [0, 2]
    assert kept(LOGITS, min_p=0.15) == [0, 1, 2, 4]
    assert kept(LOGITS, min_p=1.0) == [0]


def test_temperature_comes_before_the_filters() -> None:
    assert kept(LOGITS, top_p=0.6, temperature=0.2) == [0]
    assert kept(LOGITS, top_p=0.6, temperature=5.0) == [0, 1, 2, 4]


@pytest.mark.parametrize("vocab_size", [50, 3000, 5000])
def test_top_p_of_a_flat_distribution_looks_past_its_first_prefixes(vocab_size: int) -> None:
    logits = torch.linspace(0, -0.1, vocab_size).unsqueeze(0)
    probabilities = torch.softmax(logits.double(), -1)[0]
    wanted = int((probabilities.cumsum(0) - probabilities < 0.9).sum())
    assert len(kept(logits[0].tolist(), top_p=0.9)) == pytest.approx(wanted, abs=1)


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.randn(4, 100) * 30
    assert sample(logits, make_params(4, temperature=1e-30)).tolist() == logits.argmax(-1).tolist()


def test_the_choice_is_the_largest_sum_of_log_probability_and_noise() -> None:
    logits = torch.randn(200, 37)
    params = make_params(200, temperature=0.7, top_k=20, top_p=0.8)
    scores = probabilities_of(logits, params).log() + gumbel_noise(params.seeds, params.positions, 37)
    assert sample(logits, params).tolist() == scores.argmax(-1).tolist()


SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"temperature": 1.2, "top_k": 9, "top_p": 0.7, "min_p": 0.05},
    {"top_p": 0.1, "temperature": 3.0},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_frequencies_follow_the_distribution(settings: dict[str, float]) -> None:
    """Chi-square over 20,000 draws of the tokens kept; seed and positions are fixed, so this cannot flake."""
    num_rows, vocab_size = 20000, 12
    logits = torch.linspace(1.5, -1.5, vocab_size)[torch.randperm(vocab_size)].expand(num_rows, -1)
    params = make_params(
        num_rows,
        seeds=torch.full((num_rows,), 7),
        positions=torch.arange(num_rows),
        **settings,  # type: ignore[arg-type]
    )
    counts = torch.bincount(sample(logits, params), minlength=vocab_size).double()
    expected = probabilities_of(logits[:1], first_row(params))[0].double() * num_rows
    is_kept = expected > 0
    assert counts[~is_kept].sum() == 0
    chi_square = ((counts - expected).square() / expected)[is_kept].sum().item()
    freedom = int(is_kept.sum()) - 1
    # Mean of the statistic is `freedom`, its standard deviation sqrt(2 freedom): 4 of those.
    assert chi_square <= freedom + 4 * (2 * freedom) ** 0.5


def test_draws_of_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of draws hit all 16 pairs of 4 equally likely tokens equally often."""
    for step in ("positions", "seeds"):
        numbers, fixed = torch.arange(16001), torch.full((16001,), 3)
        order = (
            {"positions": numbers, "seeds": fixed} if step == "positions" else {"positions": fixed, "seeds": numbers}
        )
        tokens = sample(torch.zeros(16001, 4), make_params(16001, **order))
        pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
        # 1000 expected, standard deviation 31.
        assert (pairs - 1000).abs().max() < 140


def test_a_small_shift_of_the_logits_changes_few_draws() -> None:
    """Noise of relative size 1e-4 flips about as many of 4,000 draws over a flat vocabulary; an inverse CDF would flip
    hundreds, for every token behind the shifted ones moves."""
    logits = torch.randn(4000, 300)
    params = make_params(4000)
    shifted = logits + torch.randn_like(logits) * 1e-4
    assert (sample(logits, params) != sample(shifted, params)).sum() <= 4


def test_a_row_draws_alike_alone_and_among_others() -> None:
    logits = torch.randn(16, 500)
    together = sample(logits, make_params(16, temperature=0.9, top_p=0.95))
    for row in range(16):
        alone = make_params(1, temperature=0.9, top_p=0.95, seeds=torch.tensor([row]))
        assert sample(logits[row : row + 1], alone).item() == together[row].item()


def test_greedy_and_sampled_rows_in_one_call() -> None:
    logits = torch.randn(3, 400)
    params = make_params(3, temperature=1.5)
    params.temperature[1] = 0.0
    tokens = sample(logits, params)
    assert tokens[1] == logits[1].argmax()
    sampled = sample(logits[[0, 2]], make_params(2, temperature=1.5, seeds=torch.tensor([0, 2])))
    assert tokens[[0, 2]].tolist() == sampled.tolist()


def test_a_banned_token_is_never_drawn() -> None:
    logits = torch.zeros(500, 3)
    logits[:, 1] = float("-inf")
    assert 1 not in sample(logits, make_params(500)).tolist()


def test_parameters_for_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ops.ShapeError, match="sample"):
        sample(torch.zeros(2, 4), make_params(3))
    with pytest.raises(ops.ShapeError, match="sample"):
        ops.sample(torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64), make_params(2))
