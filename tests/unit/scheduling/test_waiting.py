"""Who is next: classes with ageing, keys by weighted virtual token counters, then arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runners.kv_cache.sessions import BlockTable
from runners.request import Request, SamplingParams
from runners.scheduling.waiting import WaitingQueue
from tests.support.scenario import Scenario


def make(number: int, *, at: float = 0.0, priority: int = 0, key: str = "") -> Request:
    return Request(
        f"r{number}",
        [1] * 10,
        SamplingParams(max_tokens=10),
        table=BlockTable(b""),
        number=number,
        arrival_time=at,
        priority=priority,
        key_id=key,
    )


def push(queue: WaitingQueue, request: Request) -> Request:
    request.account = queue.account(request.key_id)
    queue.push(request)
    request.account.num_live += 1
    return request


def drain(queue: WaitingQueue, charge: int = 20) -> list[str]:
    """Take everybody in turn; each costs its account `charge` tokens."""
    order = []
    while (request := queue.peek()) is not None:
        queue.take(request)
        assert request.account is not None
        request.account.charge(charge)
        order.append(request.request_id)
    return order


def test_one_class_and_one_key_are_first_come_first_served():
    queue = WaitingQueue()
    for number in range(5):
        push(queue, make(number, at=0.1 * number))
    assert drain(queue) == ["r0", "r1", "r2", "r3", "r4"]


def test_a_preempted_request_goes_back_to_its_place():
    queue = WaitingQueue()
    requests = [push(queue, make(number)) for number in range(3)]
    queue.take(requests[0])
    queue.push(requests[0])
    assert drain(queue) == ["r0", "r1", "r2"]


def test_the_more_urgent_class_goes_first():
    queue = WaitingQueue(ageing_s=10)
    push(queue, make(0, at=0, priority=2))
    push(queue, make(1, at=1, priority=1))
    push(queue, make(2, at=2, priority=0))
    assert drain(queue) == ["r2", "r1", "r0"]


def test_ageing_lets_a_request_pass_those_that_came_long_after_it():
    queue = WaitingQueue(ageing_s=10)
    push(queue, make(0, at=0, priority=1))
    push(queue, make(1, at=9, priority=0))
    push(queue, make(2, at=11, priority=0))
    # Whoever comes within 10 s per class passes it, whoever comes later does not.
    assert drain(queue) == ["r1", "r0", "r2"]


def test_keys_take_turns_whatever_one_of_them_has_queued():
    queue = WaitingQueue()
    for number in range(6):
        push(queue, make(number, key="flood"))
    push(queue, make(6, key="small"))
    push(queue, make(7, key="small"))
    assert drain(queue)[:4] == ["r0", "r6", "r1", "r7"]


def test_weights_share_in_proportion():
    queue = WaitingQueue(key_weights={"gold": 3.0, "free": 1.0})
    for number in range(80):
        push(queue, make(number, key="gold" if number % 2 else "free"))
    served = drain(queue)[:40]
    gold = sum(int(name[1:]) % 2 for name in served)
    assert gold == 30


def test_a_key_that_pauses_saves_nothing_up():
    queue = WaitingQueue()
    early = push(queue, make(0, key="pauses"))
    queue.take(early)
    early.account.charge(20)  # type: ignore[union-attr]
    early.account.num_live -= 1  # type: ignore[union-attr]
    for number in range(1, 30):
        push(queue, make(number, key="works"))
    for _ in range(20):
        request = queue.peek()
        queue.take(request)  # type: ignore[arg-type]
        request.account.charge(20)  # type: ignore[union-attr]
    for number in range(30, 40):
        push(queue, make(number, key="pauses"))
    order = drain(queue)
    assert order[:6] in (
        ["r30", "r21", "r31", "r22", "r32", "r23"],
        ["r21", "r30", "r22", "r31", "r23", "r32"],
        ["r30", "r31", "r21", "r32", "r22", "r33"],
    ), "in turns from where the other key stands, not ten in a row"


def test_a_key_with_a_request_running_saves_nothing_up_either():
    queue = WaitingQueue()
    queue.take(push(queue, make(0, key="runs")))
    for number in range(1, 11):
        request = push(queue, make(number, key="works"))
        queue.take(request)
        request.account.charge(1000)  # type: ignore[union-attr]
    push(queue, make(11, key="new"))
    for number in range(12, 20):
        push(queue, make(number, key="runs"))
    assert "r11" in drain(queue)[:2], "not behind all that the other key did not use"


def test_a_new_key_starts_from_where_the_keys_of_its_class_are():
    queue = WaitingQueue()
    for number in range(10):
        push(queue, make(number, priority=1, key="batch"))
    for number in range(10, 20):
        request = push(queue, make(number, key="chat"))
        queue.take(request)
        request.account.charge(1000)  # type: ignore[union-attr]
    push(queue, make(20, priority=1, key="new"))
    assert "r20" in drain(queue)[:2], "whatever the urgent class was given"


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.floats(0, 5), st.booleans()), min_size=1, max_size=60
    )
)
def test_everybody_gets_out_once_and_discards_leave_no_trace(arrivals):
    queue = WaitingQueue(ageing_s=2.0)
    kept = []
    for number, (priority, key, gap, stays) in enumerate(arrivals):
        request = push(queue, make(number, at=number + gap, priority=priority, key=key))
        if stays:
            kept.append(request.request_id)
        else:
            queue.discard(request)
            queue.discard(request)
    assert len(queue) == len(kept)
    assert queue.num_tokens == 10 * len(kept)
    assert sorted(request.request_id for request in queue.requests()) == sorted(kept)
    assert sorted(drain(queue)) == sorted(kept)
    assert queue.num_tokens == 0


@given(
    costs=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 100), min_size=2),
    weights=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 2.0]), max_size=4),
)
def test_backlogged_keys_never_drift_apart_by_more_than_one_request(costs, weights):
    """The bound: between keys that wait all the time, tokens over weight differ by at most one request's."""
    queue = WaitingQueue(key_weights=weights)
    for number in range(50 * len(costs)):
        push(queue, make(number, key=sorted(costs)[number % len(costs)]))
    served = dict.fromkeys(costs, 0.0)
    largest = max(cost / weights.get(key, 1.0) for key, cost in costs.items())
    for _ in range(40):
        request = queue.peek()
        assert request is not None
        queue.take(request)
        request.account.charge(costs[request.key_id])
        served[request.key_id] += costs[request.key_id] / weights.get(request.key_id, 1.0)
        assert max(served.values()) - min(served.values()) <= largest + 1e-6


def test_the_profile_names_weights_by_key():
    scenario = Scenario(slots=1, fairness={"key_weights": {"gold": 3.0}})
    for number in range(12):
        scenario.request(f"gold{number}", 20, 1, message={"key_id": "gold"})
        scenario.request(f"free{number}", 20, 1, message={"key_id": "free"})
    scenario.run()
    served = first_tokens_in_order(scenario)[:12]
    assert sum(name.startswith("gold") for name in served) == 9


# --- in the engine --------------------------------------------------------------------------------------------------


def first_tokens_in_order(scenario: Scenario) -> list[str]:
    seen: list[str] = []
    for _, output in scenario.outputs:
        if output.token_ids and output.request_id not in seen:
            seen.append(output.request_id)
    return seen


def test_a_late_key_is_served_as_soon_as_a_slot_is_free():
    scenario = Scenario(slots=2)
    for number in range(30):
        scenario.request(f"flood{number}", 20, 10, message={"key_id": "flood"})
    scenario.request("late", 20, 10, at=60, message={"key_id": "late"})
    scenario.run()
    order = first_tokens_in_order(scenario)
    waited = scenario.first_token("late") - 60
    assert waited <= 60, "one batch of the other key's requests, not all thirty"
    assert order.index("late") < 8


def test_decoded_tokens_count_as_well_as_prompts():
    scenario = Scenario(slots=1)
    for number in range(6):
        scenario.request(f"long{number}", 10, 90, message={"key_id": "long"})
        scenario.request(f"short{number}", 10, 10, message={"key_id": "short"})
    scenario.run()
    order = first_tokens_in_order(scenario)
    # 99 positions computed against 19: six short ones before the other key is behind.
    assert order[:8] == ["long0", *(f"short{number}" for number in range(6)), "long1"]


def test_an_urgent_request_is_admitted_first_and_the_other_class_does_not_starve():
    scenario = Scenario(slots=1, fairness={"ageing_s": 0.5})
    scenario.request("running", 20, 5)
    scenario.request("batch", 20, 5, at=1, message={"priority": 1})
    for number in range(60):  # one every 20 ms: more than the single slot can serve
        scenario.request(f"chat{number}", 20, 5, at=2 + 20 * number)
    scenario.run()
    order = first_tokens_in_order(scenario)
    assert order[1] == "chat0"
    # `batch` counts as arrived at 0.501 s: it passes every request that arrived after that.
    arrived_later = {f"chat{number}" for number in range(60) if 2 + 20 * number > 501}
    after_batch = set(order[order.index("batch") + 1 :])
    assert arrived_later <= after_batch | {"batch"}


def test_prompts_cost_what_is_computed_of_them():
    scenario = Scenario(slots=1)
    for number in range(6):
        scenario.request(f"long{number}", 90, 1, message={"key_id": "long"})
        scenario.request(f"short{number}", 20, 1, message={"key_id": "short"})
    scenario.run()
    assert first_tokens_in_order(scenario)[:7] == ["long0", *(f"short{number}" for number in range(5)), "long1"]


def test_a_key_that_leaves_and_comes_back_still_owes_what_it_was_given_beyond_the_others():
    queue = WaitingQueue()
    push(queue, make(0, key="steady"))
    greedy = push(queue, make(1, key="greedy"))
    queue.discard(greedy)
    greedy.account.charge(1000)  # type: ignore[union-attr]
    greedy.account.num_live -= 1  # type: ignore[union-attr]
    queue.close_account(greedy.account)  # type: ignore[arg-type]
    push(queue, make(2, key="greedy"))
    for number in range(3, 8):
        push(queue, make(number, key="steady"))
    assert drain(queue)[-1] == "r2"
