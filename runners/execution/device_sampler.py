"""From logits to tokens without leaving the device; parameters are looked up by slot.

The same choices as `runners.execution.sampler.Sampler`, whose rules these are: bias and held-back end tokens, then
penalties, then the draw; log-probabilities are of the logits as the model gave them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import ops
from runners.execution.device_slots import (
    FREQUENCY,
    MIN_END,
    MIN_P,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    DeviceSlots,
)
from runners.execution.step_keys import GREEDY, SampleMode
from runners.request import SamplingParams
from runners.scheduling.scheduler_output import SlotInit

# A graph reports this many alternatives whatever was asked, so that requests share graphs; OpenAI allows up to 20.
SHARED_NUM_TOP = 20


@dataclass(frozen=True, slots=True)
class AdjustmentTables:
    """What adjusts logits by slot, [S, V] each; 10 bytes a slot and token id, made when a request first needs it.

    bias float32 (`logit_bias`), ends bool (held back before `min_tokens`), counts int32 of generated tokens, in_prompt
    bool.
    """

    bias: torch.Tensor
    ends: torch.Tensor
    counts: torch.Tensor
    in_prompt: torch.Tensor


def needs_adjustment(sampling: SamplingParams) -> bool:
    return sampling.has_penalties or bool(sampling.logit_bias) or sampling.min_tokens > 0


class DeviceSampler:
    """Chooses a token for each row of a step."""

    def __init__(self, slots: DeviceSlots, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        num_slots = slots.table.num_slots
        self._is_adjusted = np.zeros(num_slots, dtype=bool)
        self._is_biased = np.zeros(num_slots, dtype=bool)
        self.tables: AdjustmentTables | None = None

    # --- by slot ---------------------------------------------------------------------------------------------------

    def assign(self, init: SlotInit) -> NDArray[np.int64] | None:
        """Note what the slot's request asks for. Returns the numbers that `begin` needs on the device, if any."""
        slot, sampling = init.slot, init.sampling
        self._is_adjusted[slot] = needs_adjustment(sampling)
        if not self._is_adjusted[slot] and not self._is_biased[slot]:
            return None
        self.make_tables()
        bias = [float(value) for value in sampling.logit_bias.values()]
        ends = self._ends(sampling)
        numbers = [*init.token_ids, *ends, *sampling.logit_bias]
        bits = np.array(bias, dtype=np.float32).view(np.int32).astype(np.int64)
        return np.concatenate([np.array(numbers, dtype=np.int64), bits])

    def begin(self, init: SlotInit, numbers: torch.Tensor) -> None:
        """Fill the slot's rows of the tables. `numbers` int64: what `assign` returned, on the device."""
        tables = self.tables
        assert tables is not None
        slot, num_bias = init.slot, len(init.sampling.logit_bias)
        num_ends, num_generated = len(self._ends(init.sampling)), len(init.token_ids) - init.num_prompt_tokens
        prompt, generated, ends, biased, bits = torch.split(
            numbers, [init.num_prompt_tokens, num_generated, num_ends, num_bias, num_bias]
        )
        for table in (tables.bias, tables.ends, tables.counts, tables.in_prompt):
            table[slot].zero_()
        tables.in_prompt[slot].index_fill_(0, prompt, True)
        tables.counts[slot].scatter_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
        tables.ends[slot].index_fill_(0, ends, True)
        tables.bias[slot].index_copy_(0, biased, bits.to(torch.int32).view(torch.float32))
        self._is_biased[slot] = num_bias > 0

    def mode(self, row_slots: NDArray[np.int64]) -> SampleMode:
        """What a step that samples for these slots has to do."""
        table = self._slots.table
        if table.is_plain[row_slots].all():
            return GREEDY
        drawn = row_slots[table.temperature[row_slots] != 0]
        num_top = [count for slot in row_slots.tolist() if (count := table.sampling[slot].logprobs) is not None]
        return SampleMode(
            is_drawn=len(drawn) > 0,
            has_top_k=bool((table.top_k[drawn] > 0).any()),
            has_top_p=bool((table.top_p[drawn] < 1).any()),
            is_adjusted=bool(self._is_adjusted[row_slots].any()),
            num_top=min(self._vocab_size, max(SHARED_NUM_TOP, *num_top)) if num_top else None,
        )

    # --- in a step -------------------------------------------------------------------------------------------------

    def choose(
        self,
        logits: torch.Tensor,
        slot_ids: torch.Tensor,
        context_lens: torch.Tensor,
        mode: SampleMode,
        masks: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """logits [n, V] float32, slot_ids [n] int64, context_lens [n] int32 → [n, 2 or more] int32 for the host.

        Columns: token, 1 where it is unusable; with `num_top` k also the token's log-probability (float32 bits), k
        token ids, k log-probabilities. The slots move on to their new tokens. `masks` are (row_ids, bits) of
        `ops.apply_token_mask`.
        """
        slots = self._slots
        if mode == GREEDY and masks is None:
            best = ops.argmax(logits)
            return ops.advance_slots(best, best, logits, slot_ids, context_lens, slots.last_tokens, slots.positions)
        params = slots.params.index_select(1, slot_ids)
        floats = params.view(torch.float32)
        adjusted, counts = logits, None
        if mode.is_adjusted:
            adjusted = self._adjust(logits, slot_ids, context_lens, params)
            assert self.tables is not None
            counts = self.tables.counts
        if masks is not None:
            adjusted = ops.apply_token_mask(adjusted, *masks)
        best = chosen = ops.argmax(adjusted)
        if mode.is_drawn:
            chosen = ops.sample(
                adjusted,
                best,
                ops.SamplingTensors(
                    temperature=floats[TEMPERATURE],
                    top_k=params[TOP_K],
                    top_p=floats[TOP_P],
                    min_p=floats[MIN_P],
                    seeds=slots.seeds.index_select(0, slot_ids),
                    positions=context_lens.long(),
                    any_top_k=mode.has_top_k,
                    any_top_p=mode.has_top_p,
                ),
            )
        result = ops.advance_slots(
            chosen, best, adjusted, slot_ids, context_lens, slots.last_tokens, slots.positions, counts
        )
        if mode.num_top is None:
            return result
        logprob, top_ids, top = ops.top_logprobs(logits, chosen, mode.num_top)
        bits = (logprob.unsqueeze(1).view(torch.int32), top_ids.to(torch.int32), top.view(torch.int32))
        return torch.cat((result, *bits), dim=1)

    def _adjust(
        self, logits: torch.Tensor, slot_ids: torch.Tensor, context_lens: torch.Tensor, params: torch.Tensor
    ) -> torch.Tensor:
        tables, floats = self.tables, params.view(torch.float32)
        assert tables is not None
        adjusted = logits + tables.bias.index_select(0, slot_ids)
        # The token being chosen sits at index context_len.
        is_early = (context_lens < params[MIN_END]).unsqueeze(1)
        adjusted.masked_fill_(tables.ends.index_select(0, slot_ids) & is_early, float("-inf"))
        return ops.apply_penalties(
            adjusted,
            tables.counts,
            tables.in_prompt,
            slot_ids,
            floats[PRESENCE],
            floats[FREQUENCY],
            floats[REPETITION],
        )

    def _ends(self, sampling: SamplingParams) -> list[int]:
        if not sampling.min_tokens:
            return []
        eos = () if sampling.ignore_eos else self._eos_token_ids
        return [token for token in {*sampling.stop_token_ids, *eos} if 0 <= token < self._vocab_size]

    def make_tables(self) -> None:
        """Make `tables`, once. Graphs hold on to where they lie."""
        if self.tables is not None:
            return
        shape = (self._slots.table.num_slots + 1, self._vocab_size)

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self.tables = AdjustmentTables(zeros(torch.float32), zeros(torch.bool), zeros(torch.int32), zeros(torch.bool))
