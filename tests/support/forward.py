"""A decoder's logits over one sequence, fed in pieces: the forward pass without executor or scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runners.execution.input_batch import ForwardBatch
from runners.kv_cache.device_cache import DeviceCache
from runners.models.decoder import Decoder


def logits_in_pieces(
    decoder: Decoder,
    token_ids: Sequence[int],
    pieces: Sequence[int],
    *,
    position_ids: Sequence[int] | None = None,
    block_tokens: int = 16,
) -> torch.Tensor:
    """Logits [T, V] float32 of every token, fed `pieces[0]`, `pieces[1]`, … tokens at a time.

    `position_ids` are the tokens' rotary positions, 0, 1, 2 … by default; what a token sees does not depend on them.
    """
    num_blocks = -(-len(token_ids) // block_tokens)
    device = decoder.device
    cache = DeviceCache(decoder.config, num_blocks, block_tokens, decoder.dtype, device)
    # Blocks in falling order: a table that is read as if it were rising shows.
    block_table = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32).unsqueeze(0)
    positions = torch.tensor(range(len(token_ids)) if position_ids is None else position_ids, dtype=torch.int32)
    outputs, done = [], 0
    for count in pieces:
        indices = torch.arange(done, done + count)
        done += count
        batch = ForwardBatch(
            input_ids=torch.tensor(token_ids[done - count : done], dtype=torch.int32, device=device),
            position_ids=positions[indices].to(device),
            slot_mapping=(block_table[0, indices // block_tokens].long() * block_tokens + indices % block_tokens).to(
                device
            ),
            block_tables=block_table.to(device),
            context_lens=torch.tensor([done], dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
            num_decode_rows=int(count == 1),
            max_query_len=count,
            max_context_len=done,
        )
        outputs.append(decoder.logits(decoder.forward(batch, cache.layers)))
    assert done == len(token_ids)
    return torch.cat(outputs)
