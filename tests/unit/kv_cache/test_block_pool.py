"""The pool against a plain model: a set of free ids and a counter for each of the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.kv_cache.block_pool import BlockPool


def test_hands_out_the_block_freed_last():
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release(0)
    pool.release(2)
    assert pool.allocate(3) == [2, 0, 3]


def test_all_or_nothing():
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []


def test_a_lowered_quota_takes_nothing_away_and_gives_nothing_out():
    pool = BlockPool(10)
    held = pool.allocate(6)
    pool.set_quota(4)
    assert pool.num_free == 0
    assert pool.allocate(1) is None
    for block_id in held[:3]:
        pool.release(block_id)
    assert pool.num_free == 1
    pool.set_quota(10)
    assert pool.num_free == 7


@pytest.mark.parametrize("quota", [0, -1, 11])
def test_refuses_a_quota_outside_the_pool(quota):
    with pytest.raises(ValueError, match="quota"):
        BlockPool(10).set_quota(quota)


def test_refuses_to_touch_a_free_block():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="free"):
        pool.release(0)
    with pytest.raises(ValueError, match="free"):
        pool.share_one(1)


def test_refuses_an_empty_pool():
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


@given(
    num_blocks=st.integers(1, 12),
    actions=st.lists(st.tuples(st.sampled_from(["allocate", "share", "release", "quota"]), st.integers(0, 12))),
)
def test_agrees_with_a_plain_model(num_blocks, actions):
    pool = BlockPool(num_blocks)
    references: dict[int, int] = {}
    quota = num_blocks
    for action, number in actions:
        if action == "allocate":
            got = pool.allocate(number)
            if number > max(0, quota - len(references)):
                assert got is None
            else:
                assert got is not None
                assert len(set(got)) == number
                assert not references.keys() & set(got)
                references.update(dict.fromkeys(got, 1))
        elif action == "quota":
            quota = 1 + number % num_blocks
            pool.set_quota(quota)
        elif number in references:
            if action == "share":
                pool.share_one(number)
                references[number] += 1
            else:
                references[number] -= 1
                assert pool.release(number) == references[number]
                if not references[number]:
                    del references[number]
        assert pool.num_out == len(references)
        assert pool.num_free == max(0, quota - len(references))
        assert all(pool.references(block_id) == references.get(block_id, 0) for block_id in range(num_blocks))
        pool.check_invariants()
