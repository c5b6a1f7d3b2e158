"""Which launch comes next, among requests that have been admitted.

1. suspects      rows of a decode launch that raised, each alone, to find the guilty one
2. prefills      what the last admission packed: waves, then single prompts; no decode step between
3. cursors       long prompts: a flight (overlap) or pieces beside the decode rows (merge)
4. rows          one decode step, or the sequential path for a single request
"""

from __future__ import annotations

from collections import deque

from runners.messages import OutputError
from runners.request import Request
from runners.scheduling.live_set import LiveSet
from runners.scheduling.plans import PlanBuilder, StepRecord
from runners.scheduling.policies import Policies
from runners.scheduling.scheduler_output import PlanKind, StepPlan
from runners.scheduling.width import decode_width

Launch = tuple[StepPlan, StepRecord]


class Stepper:
    """Builds one plan a call; preempts when decode rows find no block."""

    def __init__(self, policies: Policies, live: LiveSet, slots: int, notices: list[str]) -> None:
        self._policies = policies
        self._live = live
        self._slots = slots
        self._notices = notices
        self._builder = PlanBuilder()
        self._suspects: deque[Request] = deque()
        self._noted: set[tuple[PlanKind, str]] = set()
        self._resend: list[Request] = []  # rows whose new blocks were in a plan that did not launch
        self._decode_next = False  # a piece of a single prompt has gone: the rows take their turn
        self.num_row_steps = 0  # launches that carried decode rows
        self._starving: Request | None = None  # the cursor that found no blocks when its turn came

    @property
    def num_steps(self) -> int:
        return self._builder.num_steps

    @property
    def cursors_starve(self) -> bool:
        """True while the first cursor finds no blocks: nobody may be admitted past it."""
        cursors = self._live.cursors
        return bool(cursors) and cursors[0] is self._starving

    def next_step(self, now: float) -> Launch | None:
        """The next launch; None when nothing can be launched before something in flight comes back or arrives."""
        live = self._live
        if self._suspects:
            launch = self._suspect_step(now)
            if launch is not None:
                return launch
        if live.prefills and not (self._decode_next and len(live.rows)):
            return self._prefill_step()
        if live.cursors and not live.prefills:
            launch = self._cursor_step(now)
            if launch is not None:
                return launch
        return self._decode_step(now)

    # --- prefill --------------------------------------------------------------------------------------------------

    def _prefill_step(self) -> Launch:
        group = self._live.prefills[0]
        if group[0].params.pooling:
            return self._builder.build(PlanKind.EMBED, (), [(request, len(request.token_ids)) for request in group])
        if len(group) > 1:
            return self._builder.build(PlanKind.WAVE, (), [(request, len(request.token_ids)) for request in group])
        end = self._piece_end(group[0])
        self._decode_next = end < len(group[0].token_ids)
        return self._builder.build(PlanKind.CHUNK, (), [(group[0], end)])

    def _piece_end(self, request: Request) -> int:
        total = len(request.token_ids)
        return total if request.one_shot else self._policies.chunk.end(request.num_computed, total)

    def _cursor_step(self, now: float) -> Launch | None:
        live = self._live
        head = live.cursors[0]
        rows = live.rows.compact()
        if not rows and not live.flights and not head.table.block_ids:
            # Nothing to run beside: the whole prompt in one pass is the fastest way to its first token.
            if not self._start(head, 0, now):
                return None
            return self._builder.build(PlanKind.CHUNK, (), [(head, self._piece_end(head))])
        if self._policies.mix.mode == "overlap":
            return self._flight(head, rows, now)
        rows, grown = self._ensure_blocks(now)
        pieces: list[tuple[Request, int]] = []
        for cursor, end in self._policies.mix.pieces(tuple(live.cursors), live.num_cached, len(rows)):
            if not self._start(cursor, len(rows), now):
                break
            pieces.append((cursor, end))
        if not pieces:
            return self._decode_rows(rows, grown) if rows else None
        if rows:
            self._count_row_step()
        kind = PlanKind.MIXED if rows else PlanKind.CHUNK
        return self._builder.build(kind, rows, pieces, width=self._width(len(rows)), grown=grown)

    def _flight(self, head: Request, rows: list[Request], now: float) -> Launch | None:
        live = self._live
        if live.flights or not self._start(head, len(rows), now):
            return None
        kind = PlanKind.OVERLAP_PREFILL if rows else PlanKind.CHUNK
        plan, record = self._builder.build(kind, (), [(head, self._piece_end(head))])
        if plan.flight_id is not None:
            live.flights[plan.flight_id] = head
        return plan, record

    def _start(self, cursor: Request, headroom_blocks: int, now: float) -> bool:
        """A cursor gets its blocks with its first piece: until then it holds a slot and nothing else."""
        if cursor.table.block_ids:
            return True
        if not self._live.fits(cursor, now):
            return False
        started = self._live.take_blocks(cursor, headroom_blocks)
        if cursor is self._live.cursors[0]:
            self._starving = None if started else cursor
        return started

    # --- decode ---------------------------------------------------------------------------------------------------

    def _decode_step(self, now: float) -> Launch | None:
        rows, grown = self._ensure_blocks(now)
        return self._decode_rows(rows, grown) if rows else None

    def _decode_rows(self, rows: list[Request], grown: list[Request]) -> Launch:
        live = self._live
        self._count_row_step()
        sequential = self._policies.seq.takes(num_decoding=len(rows), num_live=len(live.requests))
        kind = PlanKind.SEQUENTIAL if sequential else PlanKind.DECODE
        return self._builder.build(kind, rows, (), width=self._width(len(rows)), grown=grown)

    def _count_row_step(self) -> None:
        self._decode_next = False
        self.num_row_steps += 1
        self._live.charge_decode_step()

    def _width(self, num_rows: int) -> int:
        return decode_width(self._policies.width, num_rows, self._slots)

    def _ensure_blocks(self, now: float) -> tuple[list[Request], list[Request]]:
        """(rows, those of them with a new block); every row has room for its next position.

        When blocks run out the youngest row of the least urgent class is preempted, until the others have theirs.
        """
        live = self._live
        rows = live.rows.compact()
        grown = self._resend
        self._resend = []
        needy = [request for request in rows if request.num_computed == request.capacity]
        if needy:
            if not live.extend(needy):
                for request in sorted(needy, key=lambda request: (request.priority, request.number)):
                    self._ensure_block(request, now)
                rows = live.rows.compact()
            grown += needy
        if grown:
            grown = [request for request in grown if request.row is not None]
        return rows, grown

    def _ensure_block(self, request: Request, now: float) -> None:
        live = self._live
        while request.row is not None and not live.extend([request]):
            victim = live.youngest_row()
            if victim is request and not live.others_hold_blocks(request):
                pool = live.cache.pool
                message = (
                    f"The KV cache is exhausted: {len(request.token_ids)} tokens fill "
                    f"{len(request.table.block_ids)} of {pool.quota_blocks} blocks of "
                    f"{live.cache.block_tokens} tokens, and nobody else holds any."
                )
                live.fail(request, OutputError(message, "kv_cache_exhausted"), now)
            else:
                live.preempt(victim)

    # --- launches that raised -------------------------------------------------------------------------------------

    def _suspect_step(self, now: float) -> Launch | None:
        while self._suspects:
            request = self._suspects.popleft()
            if request.row is None:
                continue
            if request.num_computed == request.capacity:
                self._ensure_block(request, now)
            if request.row is not None:
                return self._builder.build(PlanKind.DECODE, [request], (), width=self._width(1), grown=[request])
        return None

    def launch_failed(self, plan: StepPlan, record: StepRecord, error: OutputError, now: float) -> None:
        """Nothing of the plan ran: split it, or when it was one request's alone, fail that one."""
        live = self._live
        requests = [*record.rows, *(request for request, _, _ in record.chunks)]
        self._builder.undo(plan, record, {request.slot: request for request in requests if request.slot is not None})
        if plan.flight_id is not None:
            del live.flights[plan.flight_id]
        self._resend += record.rows
        cursors = [request for request, _, _ in record.chunks if not request.status.is_terminal]
        if plan.kind is PlanKind.SEQUENTIAL:
            self._policies.seq.enabled = False
            self._note(plan, error, "the sequential path is off from now on")
        elif record.rows and not record.chunks:
            if len(record.rows) > 1:
                self._suspects.extend(record.rows)
                self._note(plan, error, "its rows are launched one by one")
            elif not record.rows[0].status.is_terminal:
                live.fail(record.rows[0], error, now)
        elif len(requests) == 1 and plan.kind is not PlanKind.OVERLAP_PREFILL:
            self._single_failed(plan, cursors, error, now)
        else:
            live.prefill_alone(cursors)
            self._note(plan, error, "its prompts are computed one by one")

    def _single_failed(self, plan: StepPlan, cursors: list[Request], error: OutputError, now: float) -> None:
        for request in cursors:
            if plan.chunks[0].end < len(request.token_ids) and not request.one_shot:
                request.one_shot = True
                self._live.prefill_alone([request])
                self._note(plan, error, "the rest of the prompt goes in one piece")
            else:
                self._live.fail(request, error, now)

    def _note(self, plan: StepPlan, error: OutputError, consequence: str) -> None:
        """One line for what fails in the same way step after step."""
        if (plan.kind, error.message) not in self._noted:
            self._noted.add((plan.kind, error.message))
            launch = f"step {plan.step_id} ({plan.kind.value})"
            self._notices.append(f"{launch} could not be launched: {error.message}; {consequence}")
