"""Inputs of a decode step by slot, and the end of a step: references by hand, kernels against references."""

from __future__ import annotations

import pytest
import torch

from kernels import ops, reference

SLOTS, BLOCK_TOKENS, MAX_BLOCKS = 5, 16, 6
PADDING = SLOTS


def slot_state(device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    last_tokens = torch.arange(100, 101 + SLOTS, dtype=torch.int32, device=device)
    positions = torch.tensor([0, 15, 16, 33, 79, 0], dtype=torch.int32, device=device)
    tables = torch.arange((SLOTS + 1) * MAX_BLOCKS, dtype=torch.int32, device=device).view(SLOTS + 1, MAX_BLOCKS)
    return last_tokens, positions, tables


def test_decode_inputs_by_hand() -> None:
    rows = torch.tensor([3, 0, PADDING, 4], dtype=torch.int32)
    ids, positions, mapping, tables, lens, slots = ops.decode_inputs(rows, *slot_state(), BLOCK_TOKENS, 5)
    assert ids.tolist() == [103, 100, 105, 104]
    assert positions.tolist() == [33, 0, 0, 79]
    # Slot 3's position 33 lies in its block 2, which is 3 * 6 + 2.
    assert mapping.tolist() == [20 * 16 + 1, 0, -1, 28 * 16 + 15]
    assert lens.tolist() == [34, 1, 1, 80]
    assert slots.tolist() == [3, 0, PADDING, 4]
    assert tables.tolist() == [[slot * 6 + column for column in range(5)] for slot in (3, 0, 5, 4)]


def test_decode_inputs_kernel(triton_device: torch.device) -> None:
    from kernels.triton_ops.decode_inputs import decode_inputs

    rows = torch.tensor([3, 0, PADDING, 4, 1, 2], dtype=torch.int32, device=triton_device)
    arguments = (rows, *slot_state(triton_device), BLOCK_TOKENS, 5)
    for actual, expected in zip(decode_inputs(*arguments), reference.decode_inputs(*arguments), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def step_end(device: torch.device | str) -> tuple[torch.Tensor, ...]:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(1)).to(device)
    logits[1, 4] = float("nan")
    logits[3] = float("-inf")
    tokens = torch.tensor([2, 4, 8, 0, 3], device=device)
    best = torch.tensor([6, 4, 8, 0, 1], device=device)
    slots = torch.tensor([4, 1, PADDING, 0, PADDING], device=device)
    return tokens, best, logits, slots, torch.tensor([7, 16, 1, 3, 1], dtype=torch.int32, device=device)


def test_advance_slots_by_hand() -> None:
    last_tokens, positions, _ = slot_state()
    counts = torch.zeros(SLOTS + 1, 9, dtype=torch.int32)
    result = ops.advance_slots(*step_end("cpu"), last_tokens, positions, counts)
    assert result.tolist() == [[2, 0], [4, 1], [8, 0], [0, 1], [3, 0]]
    assert last_tokens.tolist() == [0, 4, 102, 103, 2, 105]
    assert positions.tolist() == [3, 16, 16, 33, 7, 0]
    assert counts.nonzero().tolist() == [[4, 2]]


@pytest.mark.parametrize("counted", [True, False])
def test_advance_slots_kernel(triton_device: torch.device, counted: bool) -> None:
    from kernels.triton_ops.advance_slots import advance_slots

    outcomes = []
    for implementation in (reference.advance_slots, advance_slots):
        last_tokens, positions, _ = slot_state(triton_device)
        counts = torch.ones(SLOTS + 1, 9, dtype=torch.int32, device=triton_device) if counted else None
        result = implementation(*step_end(triton_device), last_tokens, positions, counts)
        outcomes.append([result, last_tokens, positions, *([] if counts is None else [counts])])
    for expected, actual in zip(*outcomes, strict=True):
        assert torch.equal(actual, expected)
