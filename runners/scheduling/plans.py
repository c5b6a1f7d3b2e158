"""From requests to the plain data of a step plan, and back when the launch failed.

Tells the executor what it does not know yet: whose a slot is, and which blocks were added to its table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runners.request import Request
from runners.scheduling.scheduler_output import BlockAppend, DecodeRow, PlanKind, PrefillChunk, SlotInit, StepPlan


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Whose tokens a launched step brings: the step's own row to request map, and (request, end, samples) a chunk."""

    step_id: int
    rows: tuple[Request, ...]
    chunks: tuple[tuple[Request, int, bool], ...]


class PlanBuilder:
    """Numbers the steps and keeps each request's account of what was launched."""

    def __init__(self) -> None:
        self.num_steps = 0

    def build(
        self,
        kind: PlanKind,
        rows: Sequence[Request],
        pieces: Iterable[tuple[Request, int]],
        *,
        width: int = 0,
        grown: Iterable[Request] = (),
    ) -> tuple[StepPlan, StepRecord]:
        """One launch: `rows` each compute one token, `pieces` are (request, end) of prompts to compute up to there.

        `grown` are the rows whose table got longer since their last launch.
        """
        self.num_steps += 1
        inits: list[SlotInit] = []
        appends: list[BlockAppend] = []
        chunks: list[PrefillChunk] = []
        records: list[tuple[Request, int, bool]] = []
        for request, end in pieces:
            if not request.slot_ready:
                request.slot_ready = True
                inits.append(_slot_init(request))
            _append_blocks(request, appends)
            samples = end == len(request.token_ids) and request.wants_tokens
            start, request.num_computed = request.num_computed, end
            chunks.append(
                PrefillChunk(request.request_id, _slot(request), start, tuple(request.token_ids[start:end]), samples)
            )
            records.append((request, end, samples))
        for request in grown:
            _append_blocks(request, appends)
        decode_rows = tuple([DecodeRow(request.request_id, request.slot, request.num_computed) for request in rows])  # type: ignore[arg-type]
        for request in rows:
            request.num_computed += 1
        plan = StepPlan(
            step_id=self.num_steps,
            kind=kind,
            decode_rows=decode_rows,
            chunks=tuple(chunks),
            width=width,
            slot_inits=tuple(inits),
            block_appends=tuple(appends),
            flight_id=self.num_steps if kind is PlanKind.OVERLAP_PREFILL else None,
        )
        return plan, StepRecord(self.num_steps, tuple(rows), tuple(records))

    def undo(self, plan: StepPlan, record: StepRecord, by_slot: Mapping[int, Request]) -> None:
        """The launch raised and nothing ran: what the plan told the executor must be told again."""
        for request in record.rows:
            if not request.status.is_terminal:
                request.num_computed -= 1
        for chunk, (request, _, _) in zip(plan.chunks, record.chunks, strict=True):
            if not request.status.is_terminal:
                request.num_computed = chunk.start
        for init in plan.slot_inits:
            if init.slot in by_slot:
                by_slot[init.slot].slot_ready = False
        for append in plan.block_appends:
            if append.slot in by_slot:
                by_slot[append.slot].num_sent_blocks = append.start


def _slot(request: Request) -> int:
    assert request.slot is not None, "a request without a slot cannot be launched"
    return request.slot


def _slot_init(request: Request) -> SlotInit:
    return SlotInit(
        _slot(request), request.request_id, request.params, tuple(request.token_ids), request.num_prompt_tokens
    )


def _append_blocks(request: Request, appends: list[BlockAppend]) -> None:
    block_ids = request.table.block_ids
    sent = request.num_sent_blocks
    if sent < len(block_ids):
        appends.append(BlockAppend(_slot(request), sent, tuple(block_ids[sent:])))
        request.num_sent_blocks = len(block_ids)
