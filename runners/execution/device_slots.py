"""What the device keeps by slot, in one int32 tensor, and the host's account of it.

    seeds [S, 2] | last_tokens [S] | positions [S] | params [8, S] | rows [R] | block_tables [S, columns]

S is one more than the slots: the last one is padding, for rows that compute nothing. The host writes into an array of
the same layout and notes where; a plan's changes then reach the device as one list of (index, value). `last_tokens` and
`positions` move on by themselves on the device. For positions the host follows, and corrects what a plan contradicts.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray

from runners.execution.slot_table import SlotTable
from runners.scheduling.scheduler_output import BlockAppend, SlotInit

# Rows of `params`; all but the last two hold float32 bits.
TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, TOP_K, MIN_END = range(8)
_NUM_PARAMS = 8
# Columns of the block tables come in whole lines of 16, so that kernels need one variant for every table width.
TABLE_ALIGNMENT = 16


class DeviceSlots:
    """State of `num_slots` slots and of `max_rows` rows of the decode batch."""

    def __init__(
        self, num_slots: int, max_blocks: int, num_blocks: int, max_rows: int, device: torch.device | str
    ) -> None:
        self.padding_slot = num_slots
        slots = num_slots + 1
        self.table_columns = -(-max_blocks // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
        sizes = [2 * slots, slots, slots, _NUM_PARAMS * slots, max_rows, slots * self.table_columns]
        starts = np.cumsum([0, *sizes]).tolist()
        self._starts, self._num_slots_and_padding = starts, slots
        self._words = np.zeros(starts[-1], dtype=np.int32)
        parts = [self._words[start:end] for start, end in itertools.pairwise(starts)]
        self.host_positions = parts[2]
        params = parts[3].reshape(_NUM_PARAMS, slots)
        params[[TOP_P, REPETITION]] = np.float32(1.0).view(np.int32)
        self._host_rows = parts[4]
        self._host_rows[:] = self.padding_slot
        self.table = self._slot_table(num_slots, max_blocks, num_blocks, parts)
        self._min_end = params[MIN_END]
        self._changes: list[NDArray[np.int64]] = []

        self.state = torch.from_numpy(self._words).to(device, copy=True)
        views = [self.state[start:end] for start, end in itertools.pairwise(starts)]
        self.seeds = views[0].view(torch.int64)
        self.last_tokens, self.positions = views[1], views[2]
        self.params = views[3].view(_NUM_PARAMS, slots)
        self.rows = views[4]
        self.block_tables = views[5].view(slots, self.table_columns)

    def _slot_table(
        self, num_slots: int, max_blocks: int, num_blocks: int, parts: list[NDArray[np.int32]]
    ) -> SlotTable:
        """A SlotTable whose arrays lie in the host's copy of the state."""
        table = SlotTable(num_slots, max_blocks, num_blocks)
        params = parts[3].reshape(_NUM_PARAMS, -1)[:, :num_slots]
        floats = params.view(np.float32)
        table.seeds = parts[0].view(np.int64)[:num_slots]
        table.last_tokens = parts[1][:num_slots]
        table.temperature, table.top_p, table.min_p = floats[TEMPERATURE], floats[TOP_P], floats[MIN_P]
        table.presence, table.frequency = floats[PRESENCE], floats[FREQUENCY]
        table.repetition, table.top_k = floats[REPETITION], params[TOP_K]
        table.block_tables = parts[5].reshape(num_slots + 1, -1)[:num_slots, :max_blocks]
        return table

    def assign(self, init: SlotInit) -> None:
        """Begin to serve a request."""
        slot, sampling = init.slot, init.sampling
        self.table.assign(init)
        self.host_positions[slot] = max(0, len(init.token_ids) - 1)
        self._min_end[slot] = init.num_prompt_tokens + sampling.min_tokens if sampling.min_tokens else 0
        starts = self._starts
        params = starts[3] + slot + self._num_slots_and_padding * np.arange(_NUM_PARAMS)
        scalars = [2 * slot, 2 * slot + 1, starts[1] + slot, starts[2] + slot]
        self._changes.append(np.concatenate([scalars, params]))

    def allow_ends(self, slot: int) -> None:
        """`min_tokens` no longer holds end tokens back."""
        if self._min_end[slot]:
            self._min_end[slot] = 0
            self._changes.append(np.array([self._starts[3] + MIN_END * self._num_slots_and_padding + slot]))

    def append_blocks(self, append: BlockAppend) -> None:
        """Set entries start.. of the slot's block table."""
        self.table.append_blocks(append)
        first = self._starts[5] + append.slot * self.table_columns + append.start
        self._changes.append(np.arange(first, first + len(append.block_ids)))

    def set_rows(self, row_slots: NDArray[np.int64], width: int) -> None:
        """Row r of the next decode step is slot row_slots[r]; rows up to `width` beyond them are padding."""
        rows = self._host_rows[:width]
        wanted = np.full(width, self.padding_slot, dtype=np.int32)
        wanted[: len(row_slots)] = row_slots
        moved = np.flatnonzero(rows != wanted)
        if len(moved):
            rows[moved] = wanted[moved]
            self._changes.append(moved + self._starts[4])

    def expect_positions(self, row_slots: NDArray[np.int64], positions: NDArray[np.int32]) -> None:
        """The slots' last tokens sit at `positions`; where the device is elsewhere it is told so."""
        wrong = np.flatnonzero(self.host_positions[row_slots] != positions)
        if len(wrong):
            self.host_positions[row_slots[wrong]] = positions[wrong]
            self._changes.append(row_slots[wrong] + self._starts[2])

    def advanced(self, row_slots: NDArray[np.int64], positions: NDArray[np.int32]) -> None:
        """A launched step moves these slots on to `positions` by itself."""
        self.host_positions[row_slots] = positions

    def changes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(index, value) of everything the device has not been told; kept until `changes_sent`.

        An index may occur twice, but with one value, so that the order of writing does not matter.
        """
        indices = np.concatenate(self._changes) if self._changes else np.empty(0, dtype=np.int64)
        return indices, self._words[indices]

    def changes_sent(self) -> None:
        self._changes.clear()
