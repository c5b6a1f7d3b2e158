"""What must hold after every call into the scheduler, whatever the profile, the arrivals and the faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runners.request import Request, RequestStatus

if TYPE_CHECKING:
    from runners.scheduling.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """AssertionError with what is wrong. Costs time in proportion to requests and blocks."""
    live = scheduler.live
    requests = live.requests
    flying = list(live.flights.values())
    _check_places(scheduler)
    holders = [*requests.values(), *(request for request in flying if request.status.is_terminal)]
    slots = [request.slot for request in holders if request.slot is not None]
    assert len(set(slots)) == len(slots), "two requests share a slot"
    assert live.slots.num_free == live.slots.num_slots - len(slots), "slots do not add up"
    assert all(not live.slots.is_free(slot) for slot in slots), "a slot in use counts as free"
    scheduler.cache.check_invariants(request.table for request in holders)
    for request_id, request in requests.items():
        assert request_id == request.request_id
        _check_request(request, scheduler.cache.block_tokens)
    for record in (*scheduler.uncommitted, *scheduler.flight_records.values()):
        for request in record.rows:
            _check_ended(request, flying)
    assert scheduler.flight_records.keys() == live.flights.keys(), "flights and their records differ"


def _check_places(scheduler: Scheduler) -> None:
    """Every request is in exactly one place."""
    live = scheduler.live
    waiting = live.waiting.requests()
    assert len(waiting) == len(live.waiting), "the queue's length is wrong"
    assert sum(len(request.token_ids) for request in waiting) == live.waiting.num_tokens, "queued tokens do not add up"
    rows = list(live.rows)
    for request in rows:
        assert request.row is not None, "a row does not know its place"
    assert len({request.row for request in rows}) == len(rows), "two requests share a row"
    prefills = [request for group in live.prefills for request in group]
    assert all(live.prefills), "an empty group is to be prefilled"
    places = [*waiting, *live.cursors, *prefills, *rows]
    assert len({id(request) for request in places}) == len(places), "a request is in two places"
    placed = {request.request_id for request in places}
    for request_id, request in live.requests.items():
        if request_id not in placed:  # its last token is launched, and will be committed
            assert _is_under_way(scheduler, request), f"{request} is nowhere"
    assert placed <= live.requests.keys(), "a request that has ended still has a place"


def _is_under_way(scheduler: Scheduler, request: Request) -> bool:
    return any(
        request in record.rows or any(request is other for other, _, _ in record.chunks)
        for record in (*scheduler.uncommitted, *scheduler.flight_records.values())
    )


def _check_request(request: Request, block_tokens: int) -> None:
    status = request.status
    assert not status.is_terminal, f"{request} has ended and is still here"
    assert status is not RequestStatus.PREEMPTED, f"{request} hangs between running and waiting"
    blocks = len(request.table.block_ids)
    known = len(request.token_ids)
    assert known <= request.length_limit, f"{request} has more tokens than its limit"
    if status is RequestStatus.WAITING:
        assert blocks == request.num_computed == 0, f"{request} waits and holds blocks"
    else:
        assert request.slot is not None, f"{request} runs without a slot"
        assert request.num_owed == 0
        assert request.capacity == blocks * block_tokens >= request.num_computed, f"{request} runs beyond its blocks"
        assert request.num_certain <= request.num_computed
        assert request.num_sent_blocks <= blocks
    if status is RequestStatus.RUNNING:
        assert 0 <= request.num_computed + 1 - known <= 2, f"{request} has lost count of its tokens under way"
        assert request.num_computed < request.length_limit
    assert (request.row is not None) <= (status is RequestStatus.RUNNING)


def _check_ended(request: Request, flying: list[Request]) -> None:
    if request.status.is_terminal and request not in flying:
        assert request.slot is request.row is None, f"{request} has ended and holds a place"
        assert not request.table.block_ids, f"{request} has ended and holds blocks"
