"""A request's state machine: the transitions of its life, and that no other is possible."""

from __future__ import annotations

import itertools

import pytest

from runners.kv_cache.sessions import BlockTable
from runners.request import InvalidTransitionError, Request, RequestStatus, SamplingParams

W, P, R = RequestStatus.WAITING, RequestStatus.PREFILLING, RequestStatus.RUNNING
PREEMPTED = RequestStatus.PREEMPTED
ENDS = (RequestStatus.FINISHED, RequestStatus.ABORTED, RequestStatus.FAILED)
ALLOWED = {(W, P), (P, R), (R, PREEMPTED), (PREEMPTED, W)} | set(itertools.product((W, P, R, PREEMPTED), ENDS))


def request_in(status: RequestStatus) -> Request:
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=4), table=BlockTable(b""))
    request.status = status
    return request


@pytest.mark.parametrize(("before", "after"), sorted(ALLOWED, key=str))
def test_a_listed_transition_is_made(before: RequestStatus, after: RequestStatus) -> None:
    request = request_in(before)
    request.move_to(after)
    assert request.status is after


@pytest.mark.parametrize(
    ("before", "after"), [pair for pair in itertools.product(RequestStatus, repeat=2) if pair not in ALLOWED]
)
def test_any_other_transition_raises_and_changes_nothing(before: RequestStatus, after: RequestStatus) -> None:
    request = request_in(before)
    with pytest.raises(InvalidTransitionError, match=f"{before.value} -> {after.value}"):
        request.move_to(after)
    assert request.status is before


@pytest.mark.parametrize("status", RequestStatus)
def test_the_ends_are_terminal_and_nothing_else_is(status: RequestStatus) -> None:
    assert status.is_terminal is (status in ENDS)
