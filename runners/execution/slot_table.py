"""What an executor keeps by slot: block table, last token, sampling parameters, penalty counts.

A slot never moves while it serves a request; rows of a step look their slots up. Kept in numpy on the host: an eager
step reads every token back before the next one starts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runners.execution.executor import LaunchError
from runners.request import SamplingParams
from runners.scheduling.scheduler_output import BlockAppend, SlotInit

_IDLE = SamplingParams(max_tokens=0, temperature=0.0)


class SlotTable:
    """State of `num_slots` slots, each with room for `max_blocks` blocks. Arrays are indexed by slot."""

    def __init__(self, num_slots: int, max_blocks: int, num_blocks: int) -> None:
        self.num_slots = num_slots
        self.pool_blocks = num_blocks
        self.block_tables = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.block_counts = np.zeros(num_slots, dtype=np.int32)
        self.last_tokens = np.zeros(num_slots, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(num_slots, dtype=np.int32)
        self.sampling: list[SamplingParams] = [_IDLE] * num_slots
        self.token_ids: list[tuple[int, ...]] = [()] * num_slots
        # A plain slot is greedy with nothing else to do: a step of only such slots takes the short way.
        self.is_plain = np.ones(num_slots, dtype=bool)
        self.temperature = np.zeros(num_slots, dtype=np.float32)
        self.top_k = np.zeros(num_slots, dtype=np.int32)
        self.top_p = np.ones(num_slots, dtype=np.float32)
        self.min_p = np.zeros(num_slots, dtype=np.float32)
        self.seeds = np.zeros(num_slots, dtype=np.int64)
        self.presence = np.zeros(num_slots, dtype=np.float32)
        self.frequency = np.zeros(num_slots, dtype=np.float32)
        self.repetition = np.ones(num_slots, dtype=np.float32)

    def assign(self, init: SlotInit) -> None:
        """Begin to serve a request; doing it again for the same plan changes nothing."""
        slot, sampling = init.slot, init.sampling
        self.block_counts[slot] = 0
        self.last_tokens[slot] = init.token_ids[-1] if init.token_ids else 0
        self.num_prompt_tokens[slot] = init.num_prompt_tokens
        self.token_ids[slot] = init.token_ids
        self.sampling[slot] = sampling
        self.is_plain[slot] = (
            sampling.is_greedy
            and not sampling.has_penalties
            and not sampling.logit_bias
            and sampling.min_tokens == 0
            and sampling.logprobs is None
            and not sampling.grammar
        )
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seeds[slot] = _as_signed(sampling.seed)
        self.presence[slot] = sampling.presence_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.repetition[slot] = sampling.repetition_penalty

    def append_blocks(self, append: BlockAppend) -> None:
        """Set entries start.. of the slot's block table and forget what lay behind them."""
        end = append.start + len(append.block_ids)
        self.block_tables[append.slot, append.start : end] = append.block_ids
        self.block_counts[append.slot] = end

    def check_inits(self, inits: Iterable[SlotInit]) -> None:
        for init in inits:
            if not 0 <= init.slot < self.num_slots:
                raise LaunchError(f"slot {init.slot} of request {init.request_id} is outside 0..{self.num_slots - 1}")

    def check_appends(self, appends: Iterable[BlockAppend]) -> None:
        """Raise LaunchError for an entry outside the tables or a block outside the pool."""
        max_blocks = self.block_tables.shape[1]
        for append in appends:
            if not 0 <= append.slot < self.num_slots or not 0 <= append.start <= max_blocks - len(append.block_ids):
                raise LaunchError(
                    f"blocks {append.start}..{append.start + len(append.block_ids)} of slot {append.slot} lie outside "
                    f"a table of {self.num_slots} slots with {max_blocks} blocks each"
                )
            for block_id in append.block_ids:
                if not 0 <= block_id < self.pool_blocks:
                    raise LaunchError(f"block {block_id} is outside the pool of {self.pool_blocks} blocks")


def _as_signed(seed: int) -> int:
    """The low 64 bits of a seed as a signed number."""
    low = seed & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low
