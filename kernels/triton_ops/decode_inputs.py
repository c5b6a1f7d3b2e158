"""Inputs of a decode step, looked up by slot in one launch (specification: `kernels/reference/decode_inputs.py`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import dependent_launch, start_next, wait_for_inputs


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def decode_inputs_kernel(
    rows_ptr,
    last_tokens_ptr,
    positions_ptr,
    tables_ptr,
    input_ids_ptr,
    position_ids_ptr,
    slot_mapping_ptr,
    out_tables_ptr,
    context_lens_ptr,
    slot_ids_ptr,
    padding_slot,
    table_stride,
    table_width,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(rows_ptr + row)
    position = tl.load(positions_ptr + slot)
    table = tables_ptr + slot.to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_TOKENS).to(tl.int64)
    mapping = block * BLOCK_TOKENS + position % BLOCK_TOKENS
    tl.store(input_ids_ptr + row, tl.load(last_tokens_ptr + slot))
    tl.store(position_ids_ptr + row, position)
    tl.store(slot_mapping_ptr + row, tl.where(slot == padding_slot, -1, mapping))
    tl.store(context_lens_ptr + row, position + 1)
    tl.store(slot_ids_ptr + row, slot.to(tl.int64))
    out_table = out_tables_ptr + row.to(tl.int64) * table_width
    for start in range(0, table_width, BLOCK_W):
        column = start + tl.arange(0, BLOCK_W)
        inside = column < table_width
        tl.store(out_table + column, tl.load(table + column, mask=inside, other=0), mask=inside)


def decode_inputs(
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    block_tokens: int,
    table_width: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kernels.ops.decode_inputs`: one program a row."""
    width, device = rows.shape[0], rows.device
    input_ids, position_ids, context_lens = torch.empty(3, width, dtype=torch.int32, device=device).unbind(0)
    slot_mapping, slot_ids = torch.empty(2, width, dtype=torch.int64, device=device).unbind(0)
    tables = torch.empty(width, table_width, dtype=torch.int32, device=device)
    if width:
        decode_inputs_kernel[(width,)](
            rows,
            last_tokens,
            positions,
            block_tables,
            input_ids,
            position_ids,
            slot_mapping,
            tables,
            context_lens,
            slot_ids,
            last_tokens.shape[0] - 1,
            block_tables.stride(0),
            table_width,
            BLOCK_TOKENS=block_tokens,
            BLOCK_W=min(1024, triton.next_power_of_2(table_width)),
            num_warps=1,
            **dependent_launch(rows),
        )
    return input_ids, position_ids, slot_mapping, tables, context_lens, slot_ids
