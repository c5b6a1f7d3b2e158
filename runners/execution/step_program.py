"""The device's part of a step: inputs by slot, forward pass, sampling, in bodies that a graph can capture."""

from __future__ import annotations

import torch

from kernels import ops
from runners.execution.device_sampler import DeviceSampler
from runners.execution.device_slots import DeviceSlots
from runners.execution.input_batch import ForwardBatch
from runners.execution.packed_step import padded_table_width, unpack_step
from runners.execution.step_keys import DecodeKey, StepKey
from runners.kv_cache.device_cache import DeviceCache
from runners.models.fused_forward import Forward

Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""logits [n, V] float32, slot_ids [n] int64, context_lens [n] int32, hidden states [T, hidden]."""


class StepProgram:
    """A model, its cache and its slots, as work for a key."""

    def __init__(self, forward: Forward, cache: DeviceCache, slots: DeviceSlots, sampler: DeviceSampler) -> None:
        self.forward = forward
        self._cache = cache
        self._slots = slots
        self._sampler = sampler
        device = slots.state.device
        self._cu_seqlens = torch.arange(len(slots.rows) + 1, dtype=torch.int32, device=device)

    def step(self, key: StepKey, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Forward pass and sampling: ([n, 2 or more] int32 of `DeviceSampler.choose`,); () where nobody samples."""
        logits, slot_ids, context_lens, _ = self.score(key, words)
        if not key.samples:
            return ()
        return (self._sampler.choose(logits, slot_ids, context_lens, key.mode),)

    def score(self, key: StepKey, words: torch.Tensor) -> Scored:
        """The forward pass alone, and the logits of the sequences that may sample.

        `words` is the packed pass (`pack_step`); a decode step needs none, its rows are in the slots.
        """
        if isinstance(key, DecodeKey):
            return self._score_rows(key)
        batch, sample_slots, context_lens = unpack_step(words, key, self._slots, self._cache.block_tokens)
        hidden = self.forward.hidden(batch, self._cache.layers)
        if not key.samples:
            return hidden.new_empty(0, dtype=torch.float32), sample_slots, context_lens, hidden
        assert batch.logits_indices is not None
        logits = self.forward.logits(hidden.index_select(0, batch.logits_indices))
        return logits, sample_slots, context_lens, hidden

    def _score_rows(self, key: DecodeKey) -> Scored:
        slots, width, block_tokens = self._slots, key.width, self._cache.block_tokens
        table_width = min(slots.table_columns, padded_table_width(key.max_context, block_tokens))
        input_ids, position_ids, slot_mapping, tables, context_lens, slot_ids = ops.decode_inputs(
            slots.rows[:width], slots.last_tokens, slots.positions, slots.block_tables, block_tokens, table_width
        )
        batch = ForwardBatch(
            input_ids=input_ids,
            position_ids=position_ids,
            slot_mapping=slot_mapping,
            block_tables=tables,
            context_lens=context_lens,
            cu_seqlens_q=self._cu_seqlens[: width + 1],
            num_decode_rows=width,
            max_query_len=1,
            max_context_len=key.max_context,
        )
        hidden = self.forward.hidden(batch, self._cache.layers)
        return self.forward.logits(hidden), slot_ids, context_lens, hidden
