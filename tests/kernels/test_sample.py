from __future__ import annotations

import itertools

import pytest
import torch

from kernels import ops
from kernels.reference.random_uniform import random_uniform
from kernels.reference.sample import filtered_probabilities

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


def kept(logits: list[float], **settings: float) -> list[int]:
    """Ids that survive the filters, for one row."""
    probabilities = filtered_probabilities(torch.tensor([logits]), make_params(1, **settings))  # type: ignore[arg-type]
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
    assert ops.sample(logits, make_params(4, temperature=1e-30)).tolist() == logits.argmax(-1).tolist()


def test_the_draw_is_the_inverse_cdf_in_id_order() -> None:
    logits = torch.randn(200, 37)
    params = make_params(200, temperature=0.7, top_k=20, top_p=0.8)
    tokens = ops.sample(logits, params)
    probabilities = filtered_probabilities(logits, params).double()
    uniform = random_uniform(params.seeds, params.positions).tolist()
    for row, token in enumerate(tokens.tolist()):
        masses = list(itertools.accumulate(probabilities[row].tolist()))
        target = uniform[row] * masses[-1]
        assert token == next(token_id for token_id, mass in enumerate(masses) if mass > target)


def test_frequencies_follow_the_distribution() -> None:
    num_rows = 20000
    params = make_params(num_rows, seeds=torch.full((num_rows,), 7), positions=torch.arange(num_rows))
    tokens = ops.sample(torch.tensor(LOGITS).expand(num_rows, -1), params)
    counts = torch.bincount(tokens, minlength=5) / num_rows
    # Standard deviation at most 0.0036; seed and positions are fixed, so this cannot flake.
    torch.testing.assert_close(counts, torch.tensor(LOGITS).exp(), rtol=0, atol=0.012)


def test_a_row_draws_alike_alone_and_among_others() -> None:
    logits = torch.randn(16, 500)
    together = ops.sample(logits, make_params(16, temperature=0.9, top_p=0.95))
    for row in range(16):
        alone = make_params(1, temperature=0.9, top_p=0.95, seeds=torch.tensor([row]))
        assert ops.sample(logits[row : row + 1], alone).item() == together[row].item()


def test_greedy_and_sampled_rows_in_one_call() -> None:
    logits = torch.randn(3, 400)
    params = make_params(3, temperature=1.5)
    params.temperature[1] = 0.0
    tokens = ops.sample(logits, params)
    assert tokens[1] == logits[1].argmax()
    sampled = ops.sample(logits[[0, 2]], make_params(2, temperature=1.5, seeds=torch.tensor([0, 2])))
    assert tokens[[0, 2]].tolist() == sampled.tolist()


def test_a_banned_token_is_never_drawn() -> None:
    logits = torch.zeros(500, 3)
    logits[:, 1] = float("-inf")
    assert 1 not in ops.sample(logits, make_params(500)).tolist()


def test_parameters_for_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ops.ShapeError, match="sample"):
        ops.sample(torch.zeros(2, 4), make_params(3))
