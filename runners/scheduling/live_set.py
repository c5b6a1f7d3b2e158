"""Every request that has not ended, and what it holds: a place in the queue, a slot, blocks, a row, a session's turn.

The only place where requests change status and where slots and blocks are taken and given back.

    waiting ──► cursors (long prompts: a slot, no blocks until their first piece) ──┐
        └─────► prefills (admitted: slot and blocks; one entry a launch) ───────────┴──► joining ──► rows
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.sessions import BlockTable
from runners.messages import OutputError, RequestOutput
from runners.request import Request, RequestStatus
from runners.scheduling.rows import DecodeBatch
from runners.scheduling.slots import SlotMap
from runners.scheduling.waiting import Account, WaitingQueue


class LiveSet:
    """Requests by id, and by where they stand."""

    def __init__(self, cache: CacheManager, num_slots: int, waiting: WaitingQueue) -> None:
        self.cache = cache
        self.slots = SlotMap(num_slots)
        self.waiting = waiting
        self.requests: dict[str, Request] = {}
        self.cursors: deque[Request] = deque()
        self.prefills: deque[list[Request]] = deque()
        self.rows = DecodeBatch()
        self.flights: dict[int, Request] = {}  # what an overlap prefill computes, until the executor reports it
        self.outputs: list[RequestOutput] = []
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._num_arrivals = 0
        self._decoding: dict[str, Account] = {}  # accounts with rows in the decode batch

    # --- arrival and admission --------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A new request joins the queue."""
        self._num_arrivals += 1
        request.number = self._num_arrivals
        account = request.account = self.waiting.account(request.key_id)
        self.requests[request.request_id] = request
        self.waiting.push(request)
        account.num_live += 1

    def num_cached(self, request: Request) -> int:
        """Tokens that need no computing: computed already, or for a request without blocks, in the cache."""
        if request.table.block_ids or not request.may_use_cache:
            return request.num_computed
        return self.cache.num_cached(request.table, request.token_ids, request.session, request.session_shared)

    def fits(self, request: Request, now: float) -> bool:
        """False when it cannot run even alone (the quota was lowered, or it has grown): it has failed now."""
        needed = self.cache.blocks_for(len(request.token_ids))
        if needed <= self.cache.pool.quota_blocks:
            return True
        self.fail(request, OutputError(self.cache.too_large(len(request.token_ids)), "context_length_exceeded"), now)
        return False

    def take_slot(self, request: Request, *, highest: bool, num_tokens: int, waited_s: float) -> None:
        """Out of the queue into a free slot; its account pays for the `num_tokens` that are to be computed."""
        if request.queue_s is None:
            request.queue_s = waited_s
        request.slot = self.slots.take_highest() if highest else self.slots.take_lowest()
        self.waiting.take(request)
        _account(request).charge(num_tokens)

    def take_blocks(self, request: Request, headroom_blocks: int) -> bool:
        """Blocks for every known token; the request starts to prefill.

        False when not so many are available, with `headroom_blocks` more for those who run already.
        """
        pinned = self.cache.sessions.num_pinned_blocks
        got = self._allocate(request, headroom_blocks)
        if got is None and self.cache.sessions.num_pinned_blocks < pinned:
            # Others gave up blocks that its own session has too: these count as its own only now.
            got = self._allocate(request, headroom_blocks)
        if got is None:
            return False
        request.table, request.num_computed = got
        request.num_prefilled = request.num_computed
        request.capacity = len(request.table.block_ids) * self.cache.block_tokens
        if request.cached_tokens is None:
            request.cached_tokens = request.num_computed
            self.prompt_tokens += request.num_prompt_tokens
            self.cached_tokens += request.num_computed
        request.move_to(RequestStatus.PREFILLING)
        return True

    def _allocate(self, request: Request, headroom_blocks: int) -> tuple[BlockTable, int] | None:
        return self.cache.allocate(
            request.table,
            request.token_ids,
            headroom_blocks=headroom_blocks,
            session=request.session,
            shared=request.session_shared,
            use_prefix=request.may_use_cache,
        )

    def extend(self, requests: Sequence[Request]) -> bool:
        """Room for one more block of tokens each; False, and nothing done, when there are not enough."""
        if not self.cache.extend([request.table for request in requests]):
            return False
        for request in requests:
            request.capacity += self.cache.block_tokens
        return True

    def leave_prefill(self, request: Request) -> None:
        """Its whole prompt has been launched: decode from the next step on, if a further token is wanted."""
        self._leave_lists(request)
        if not request.wants_tokens:
            return
        request.move_to(RequestStatus.RUNNING)
        if request.num_computed + 1 >= request.length_limit:
            return
        self.rows.join(request)
        account = _account(request)
        account.num_decoding += 1
        self._decoding[account.key_id] = account

    def leave_rows(self, request: Request) -> None:
        """No further decode step is wanted, or the request gives up its place."""
        if request.row is not None:
            self.rows.discard(request)
            account = _account(request)
            account.num_decoding -= 1
            if account.num_decoding == 0:
                del self._decoding[account.key_id]

    def charge_decode_step(self) -> None:
        """One token to the account of every row."""
        for account in self._decoding.values():
            account.charge(account.num_decoding)

    def prefill_alone(self, requests: list[Request]) -> None:
        """A launch that these prompts shared has failed: next, each is launched by itself."""
        for request in requests:
            self._leave_lists(request)
        self.prefills.extendleft([request] for request in reversed(requests))

    def others_hold_blocks(self, request: Request) -> bool:
        """True when a request other than this one, of any model, could give blocks back by going on."""
        return (
            bool(self.flights)
            or any(other is not request and other.table.block_ids for other in self.requests.values())
            or any(budget.others_hold_blocks(self.cache) for budget in self.cache.budgets)
        )

    # --- preemption -------------------------------------------------------------------------------------------------

    def youngest_row(self) -> Request:
        """Who gives way when blocks run out: of the least urgent class the one that arrived last."""
        return max(self.rows, key=lambda request: (request.priority, request.number))

    def preempt(self, request: Request) -> None:
        """Give blocks and slot back and wait again; what was generated is kept and computed again later.

        Tokens of launched steps still come back: they are appended, and until then the request is not admitted.
        """
        request.num_owed = request.num_computed + 1 - len(request.token_ids)
        request.move_to(RequestStatus.PREEMPTED)
        self._give_back(request)
        self.cache.release(request.table)
        request.num_computed = request.num_prefilled = request.capacity = 0
        request.decoding = False
        request.move_to(RequestStatus.WAITING)
        self.waiting.push(request)
        self.num_preemptions += 1

    # --- ends -------------------------------------------------------------------------------------------------------

    def finish(self, request: Request, now: float, *, keep_tokens: int | None = None) -> None:
        """A normal end; the last output is the caller's affair. Generated tokens beyond `keep_tokens` are forgotten."""
        request.move_to(RequestStatus.FINISHED)
        if keep_tokens is not None and keep_tokens < request.num_generated:
            self.waiting.discard(request)
            request.num_prefilled = min(request.num_certain, request.num_prompt_tokens + keep_tokens)
            request.decoding = False
            del request.token_ids[request.num_prompt_tokens + keep_tokens :]
        self._end(request, now, whole_turn=True)

    def fail(self, request: Request, error: OutputError, now: float, *, distrust: bool = False) -> None:
        """This request's own error; the others go on. `distrust`: its KV may be wrong, so nobody else may read it."""
        request.move_to(RequestStatus.FAILED)
        if distrust:
            self.cache.forget(request.table)
        self.outputs.append(RequestOutput(request.request_id, error=error))
        self._end(request, now, whole_turn=False)

    def abort(self, request: Request, now: float) -> None:
        """Nobody reads any more; no output."""
        request.move_to(RequestStatus.ABORTED)
        self._end(request, now, whole_turn=False)

    def land(self, flight_id: int) -> Request | None:
        """The flight was reported: its request, or None when that ended under way (its blocks come back now)."""
        request = self.flights.pop(flight_id)
        if not request.status.is_terminal:
            return request
        self._give_back_all(request)
        return None

    def _end(self, request: Request, now: float, *, whole_turn: bool) -> None:
        del self.requests[request.request_id]
        if request in self.flights.values():
            # A second stream is still writing its blocks: slot and blocks stay until the flight is reported.
            self._leave_lists(request)
            self._close_turn(request, self.cache.new_table(), 0, now, whole_turn=whole_turn)
            return
        if request.status is not RequestStatus.FAILED:
            self.cache.commit(request.table, request.token_ids, request.num_certain)
        if request.table.block_ids:
            table, request.table = request.table, self.cache.new_table()
            self._close_turn(request, table, request.num_certain, now, whole_turn=whole_turn)
        elif request.session is not None:  # it waits: the session's blocks are still the session's own
            certain = request.session.num_computed
            table = self.cache.sessions.take_table(request.session)
            self._close_turn(request, table, min(certain, request.session_shared), now, whole_turn=whole_turn)
        self._give_back_all(request)

    def _close_turn(self, request: Request, table: BlockTable, certain: int, now: float, *, whole_turn: bool) -> None:
        """Hand the table to the session whose turn this was, or release it. `certain` tokens of it have KV."""
        session, request.session = request.session, None
        if session is None:
            self.cache.release(table)
        elif whole_turn:
            kept = self.cache.trim(table, min(certain, len(request.token_ids)))
            self.cache.sessions.end_turn(session, request.token_ids, request.num_prompt_tokens, table, kept, now)
        else:
            kept = self.cache.trim(table, min(certain, request.session_shared))
            self.cache.sessions.abort_turn(session, table, kept, now)

    def _give_back_all(self, request: Request) -> None:
        self._give_back(request)
        self.cache.release(request.table)
        account = _account(request)
        account.num_live -= 1
        if account.num_live == 0:
            self.waiting.close_account(account)

    def _give_back(self, request: Request) -> None:
        self.waiting.discard(request)
        self.leave_rows(request)
        self._leave_lists(request)
        if request.slot is not None:
            self.slots.release(request.slot)
            request.slot = None
        request.slot_ready = False
        request.num_sent_blocks = 0

    def _leave_lists(self, request: Request) -> None:
        if request in self.cursors:
            self.cursors.remove(request)
            return
        for group in self.prefills:
            if request in group:
                group.remove(request)
                if not group:
                    self.prefills.remove(group)
                return


def _account(request: Request) -> Account:
    assert request.account is not None, "a request in the live set has an account"
    return request.account
