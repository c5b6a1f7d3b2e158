"""Turns between models: equal time, quick returns, and the stated bound on waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runners.scheduling.arbiter import Arbiter


def run(arbiter: Arbiter, lengths: dict[str, float], until: float) -> dict[str, float]:
    """All models always have work; returns the device time of each."""
    spent = dict.fromkeys(lengths, 0.0)
    now = 0.0
    while now < until:
        model = arbiter.order((name, 0) for name in lengths)[0]
        arbiter.launched(model)
        arbiter.ran(model, lengths[model])
        spent[model] += lengths[model]
        now += lengths[model]
    return spent


def joined(*models: str) -> Arbiter:
    arbiter = Arbiter()
    for model in models:
        arbiter.join(model)
    return arbiter


def test_long_steps_and_short_ones_get_equal_time():
    spent = run(joined("prefills", "decodes"), {"prefills": 0.5, "decodes": 0.005}, 100.0)
    assert abs(spent["prefills"] - spent["decodes"]) <= 0.505


def test_a_first_step_goes_before_anyone_s_second():
    arbiter = joined("a", "b")
    arbiter.ran("b", 5.0)
    assert arbiter.order([("a", 1), ("b", 0)]) == ["b", "a"]


def test_who_returns_goes_first_and_has_saved_nothing_up():
    arbiter = joined("busy", "quiet")
    run(arbiter, {"busy": 1.0}, 100.0)
    arbiter.woke("quiet")
    assert arbiter.order([("busy", 0), ("quiet", 0)])[0] == "quiet"
    spent = run(arbiter, {"busy": 1.0, "quiet": 1.0}, 10.0)
    assert abs(spent["busy"] - spent["quiet"]) <= 1.0


def test_a_model_that_joins_starts_where_the_others_are():
    arbiter = joined("old")
    run(arbiter, {"old": 1.0}, 50.0)
    arbiter.join("new")
    spent = run(arbiter, {"old": 1.0, "new": 1.0}, 20.0)
    assert abs(spent["old"] - spent["new"]) <= 2.0  # of fifty


@given(
    longest=st.lists(st.floats(0.001, 2.0), min_size=2, max_size=4),
    turns=st.lists(st.tuples(st.floats(0.01, 1.0), st.lists(st.booleans(), min_size=4, max_size=4)), max_size=120),
)
def test_nobody_waits_longer_than_the_bound(longest, turns):
    """Steps of random length up to each model's longest; models come and go at random."""
    names = [str(index) for index in range(len(longest))]
    limit = dict(zip(names, longest, strict=True))
    arbiter = joined(*names)
    has_work = dict.fromkeys(names, False)
    waited = {name: dict.fromkeys(names, 0.0) for name in names}  # others' time since it could have been launched
    for part, coming in turns:
        for name, comes in zip(names, coming, strict=False):
            if comes and not has_work[name]:
                has_work[name] = True
                arbiter.woke(name)
                waited[name] = dict.fromkeys(names, 0.0)
        ready = [(name, 0) for name in names if has_work[name]]
        if not ready:
            continue
        chosen = arbiter.order(ready)[0]
        arbiter.launched(chosen)
        length = part * limit[chosen]
        arbiter.ran(chosen, length)
        waited[chosen] = dict.fromkeys(names, 0.0)
        has_work[chosen] = coming[int(chosen)]  # some go on, some have ended
        for name, _ in ready:
            if name != chosen:
                waited[name][chosen] += length
                assert waited[name][chosen] <= limit[name] + limit[chosen] + 1e-9
