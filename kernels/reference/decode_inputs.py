"""Inputs of a decode step, looked up by slot: row r computes the last token of slot rows[r]."""

from __future__ import annotations

import torch


def decode_inputs(
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    block_tokens: int,
    table_width: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows [W], last_tokens, positions [slots + 1], block_tables [slots + 1, max_blocks], all int32.

    Returns input_ids [W] int32, position_ids [W] int32, slot_mapping [W] int64, block_tables [W, table_width] int32,
    context_lens [W] int32, slot_ids [W] int64. A row of the last slot is padding: its KV is written nowhere.
    """
    slot_ids = rows.long()
    position_ids = positions.index_select(0, slot_ids)
    tables = block_tables[:, :table_width].index_select(0, slot_ids)
    blocks = tables.gather(1, (position_ids // block_tokens).long().unsqueeze(1)).squeeze(1)
    mapping = blocks.long() * block_tokens + position_ids % block_tokens
    is_padding = slot_ids == last_tokens.shape[0] - 1
    mapping = torch.where(is_padding, -1, mapping)
    return last_tokens.index_select(0, slot_ids), position_ids, mapping, tables, position_ids + 1, slot_ids
