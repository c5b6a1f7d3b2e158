from __future__ import annotations

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


def test_formula_token_by_token() -> None:
    num_rows, slots, vocab_size = 3, 5, 11
    logits = torch.randn(num_rows, vocab_size)
    counts = torch.randint(0, 3, (slots, vocab_size), dtype=torch.int32)
    in_prompt = torch.rand(slots, vocab_size) < 0.3
    slot_ids = torch.tensor([4, 0, 2])
    presence, frequency = torch.tensor([0.5, -0.3, 0.0]), torch.tensor([0.2, 0.7, 0.0])
    repetition = torch.tensor([1.3, 0.8, 1.0])
    before = logits.clone()
    result = ops.apply_penalties(logits, counts, in_prompt, slot_ids, presence, frequency, repetition)
    assert torch.equal(logits, before)
    for row in range(num_rows):
        slot = int(slot_ids[row])
        for token in range(vocab_size):
            value, count = logits[row, token].item(), int(counts[slot, token])
            if count > 0 or in_prompt[slot, token]:
                value = value / repetition[row].item() if value > 0 else value * repetition[row].item()
            value -= frequency[row].item() * count + (presence[row].item() if count > 0 else 0.0)
            assert result[row, token].item() == pytest.approx(value, abs=1e-6)
    assert torch.equal(result[2], logits[2])


def test_prompt_tokens_are_no_business_of_presence_and_frequency() -> None:
    logits = torch.ones(1, 4)
    in_prompt = torch.tensor([[True, True, False, False]])
    counts = torch.zeros(1, 4, dtype=torch.int32)
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    result = ops.apply_penalties(logits, counts, in_prompt, torch.tensor([0]), two, two, one)
    assert torch.equal(result, logits)


def test_tables_of_another_vocabulary_are_refused() -> None:
    one = torch.tensor([1.0])
    with pytest.raises(ops.ShapeError, match="apply_penalties"):
        ops.apply_penalties(
            torch.zeros(1, 4), torch.zeros(1, 5, dtype=torch.int32), torch.zeros(1, 5, dtype=torch.bool),
            torch.tensor([0]), one, one, one,
        )  # fmt: skip
