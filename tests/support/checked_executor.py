"""A simulated device that remembers what was written into every block, and refuses what a real one would get wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from runners.execution.simulated import SimulatedExecutor
from runners.scheduling.scheduler_output import DecodeRow, PlanKind, PrefillChunk, StepPlan


class DeviceFault(AssertionError):
    """A plan that would corrupt a sequence."""


@dataclass
class SlotState:
    request_id: str
    tokens: list[int]
    block_ids: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)

    def content(self, position: int) -> int:
        """What the KV at `position` depends on: every token up to there."""
        while len(self.chain) <= position:
            before = self.chain[-1] if self.chain else 0
            self.chain.append(crc32(b"%d" % self.tokens[len(self.chain)], before))
        return self.chain[position]


class CheckedExecutor(SimulatedExecutor):
    """KV is a dict from (block, offset) to a digest of all tokens up to that position.

    Each launch checks that its slot is whose the plan says, that the input token exists (sampled by an earlier launch,
    or given), that its table has room, and that every earlier position of the sequence holds the right KV.
    """

    def __init__(self, *arguments: Any, block_tokens: int = 16, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.block_tokens = block_tokens
        self.slots: dict[int, SlotState] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.flying: dict[int, tuple[StepPlan, set[int], list[tuple[tuple[int, int], int]]]] = {}

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        rows = plan.decode_rows
        if plan.width < len(rows):
            raise DeviceFault(f"width {plan.width} for {len(rows)} rows")
        if plan.kind is PlanKind.SEQUENTIAL and (len(rows) != 1 or plan.chunks):
            raise DeviceFault("a sequential step carries exactly one row")
        for init in plan.slot_inits:
            self.slots[init.slot] = SlotState(init.request_id, list(init.token_ids))
        for append in plan.block_appends:
            table = self.slots[append.slot].block_ids
            if len(table) != append.start:
                raise DeviceFault(f"blocks from {append.start} on a table of {len(table)}")
            table.extend(append.block_ids)
        touched: set[int] = set()
        writes: list[tuple[tuple[int, int], int]] = []
        for row in rows:
            writes += self._row(row, touched)
        for chunk in plan.chunks:
            writes += self._chunk(chunk, touched)
        written = [where for where, _ in writes]
        if len(set(written)) != len(written):
            raise DeviceFault("two sequences write one position of a block")
        for _, blocks, _ in self.flying.values():
            if blocks & {block for block, _ in written} or (plan.flight_id is None and blocks & touched):
                raise DeviceFault("a step touches blocks of a flight")
        if plan.flight_id is not None:
            self.flying[plan.flight_id] = (plan, {block for block, _ in written}, writes)
        else:
            self.kv.update(writes)

    def completed_flights(self):
        done = super().completed_flights()
        for flight_id, _ in done:
            _, _, writes = self.flying.pop(flight_id)
            self.kv.update(writes)
        return done

    def _row(self, row: DecodeRow, touched: set[int]) -> list[tuple[tuple[int, int], int]]:
        state = self._state(row)
        if len(state.tokens) != row.position + 1:
            raise DeviceFault(f"{row.request_id}: input at {row.position}, but {len(state.tokens)} tokens are known")
        self._check_context(state, row.position, touched)
        write = self._where(state, row.position), state.content(row.position)
        state.tokens.append(self._token_of(row.request_id, row.position + 1))
        return [write]

    def _chunk(self, chunk: PrefillChunk, touched: set[int]) -> list[tuple[tuple[int, int], int]]:
        state = self._state(chunk)
        if tuple(state.tokens[chunk.start : chunk.end]) != chunk.token_ids or not chunk.token_ids:
            raise DeviceFault(f"{chunk.request_id}: a chunk that is not its sequence")
        self._check_context(state, chunk.start, touched)
        writes = [(self._where(state, position), state.content(position)) for position in range(chunk.start, chunk.end)]
        if chunk.samples:
            if chunk.end != len(state.tokens):
                raise DeviceFault(f"{chunk.request_id}: samples before its last token")
            state.tokens.append(self._token_of(chunk.request_id, chunk.end))
        return writes

    def _state(self, part: DecodeRow | PrefillChunk) -> SlotState:
        state = self.slots[part.slot]
        if state.request_id != part.request_id:
            raise DeviceFault(f"slot {part.slot} is {state.request_id}'s, not {part.request_id}'s")
        return state

    def _where(self, state: SlotState, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.block_tokens)
        if block >= len(state.block_ids):
            raise DeviceFault(f"{state.request_id}: no block for position {position}")
        return state.block_ids[block], offset

    def _check_context(self, state: SlotState, num_tokens: int, touched: set[int]) -> None:
        for position in range(num_tokens):
            where = self._where(state, position)
            touched.add(where[0])
            if self.kv.get(where) != state.content(position):
                raise DeviceFault(f"{state.request_id}: wrong KV at position {position} of {num_tokens}")
