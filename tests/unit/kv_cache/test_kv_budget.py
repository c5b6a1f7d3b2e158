"""Several models under one KV budget: who gets blocks, who gives way, and that every block is accounted for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runners.kv_cache.block_pool import free_list
from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.kv_budget import KvBudget
from runners.kv_cache.sessions import BlockTable
from tests.support.block_accounts import joint_free_list_is_exact

BLOCK = 4


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def sharing(num_blocks: int, models: int = 2, **options) -> tuple[KvBudget, list[int], list[CacheManager]]:
    """Models on one pool."""
    budget, free = KvBudget(num_blocks), free_list(num_blocks)
    return (
        budget,
        free,
        [CacheManager(num_blocks, BLOCK, free=free, budgets=[budget], **options) for _ in range(models)],
    )


def hold(cache: CacheManager, blocks: int, start: int = 0) -> BlockTable | None:
    """A table of so many blocks, as a new request gets it."""
    got = cache.allocate(cache.new_table(), tokens(blocks * BLOCK, start))
    return None if got is None else got[0]


def end(cache: CacheManager, table: BlockTable, start: int = 0) -> None:
    """Its request ends; what it computed becomes a known beginning."""
    num_tokens = len(table.block_ids) * BLOCK
    cache.commit(table, tokens(num_tokens, start), num_tokens)
    cache.release(table)


def test_a_block_given_back_by_one_model_serves_the_other():
    _, free, (first, second) = sharing(4)
    table = hold(first, 4)
    assert table is not None
    assert hold(second, 1) is None
    first.release(table)
    moved = hold(second, 4)
    assert moved is not None
    assert sorted(moved.block_ids) == sorted(table.block_ids or range(4))
    assert first.pool.num_out == 0
    assert joint_free_list_is_exact(4, free, [first, second])


def test_cached_beginnings_of_one_model_are_evicted_for_another():
    _, free, (first, second) = sharing(8)
    table = hold(first, 6)
    assert table is not None
    end(first, table)
    assert first.prefix.num_idle == 6
    assert (first.num_available, second.num_available) == (8, 8)
    assert hold(second, 5) is not None
    assert first.prefix.num_idle == 3
    assert joint_free_list_is_exact(8, free, [first, second])


def test_the_oldest_conversation_of_any_model_gives_way():
    _, free, caches = sharing(9, models=3)
    for used_at, cache in zip((3.0, 1.0, 2.0), caches, strict=True):
        session = cache.sessions.begin("chat", "turn", cache.root("", ""), 0.0)
        got = cache.allocate(cache.new_table(), tokens(3 * BLOCK), session=session)
        assert got is not None
        cache.sessions.end_turn(session, tokens(3 * BLOCK), BLOCK, got[0], 3 * BLOCK, used_at)
    assert hold(caches[0], 2) is not None
    assert [cache.sessions.num_pinned_blocks for cache in caches] == [3, 0, 3]
    assert joint_free_list_is_exact(9, free, caches)


def test_models_of_other_geometry_share_bytes():
    budget = KvBudget(100)
    small = CacheManager(10, BLOCK, budgets=[budget], block_bytes=10)
    large = CacheManager(3, BLOCK, budgets=[budget], block_bytes=30)
    table = hold(large, 2)
    assert table is not None
    assert (small.num_available, large.num_available) == (4, 1)
    assert hold(small, 5) is None
    kept = hold(small, 2)
    assert kept is not None
    assert large.num_available == 0  # 20 bytes are left
    large.release(table)
    assert budget.free_bytes == 80


def test_who_waits_longer_goes_first_however_small_the_others_are():
    _, _, (busy, patient) = sharing(10)
    running = [hold(busy, 2, start=100 * index) for index in range(5)]
    assert hold(patient, 6) is None
    for index, table in enumerate(running[:3]):
        assert table is not None
        busy.release(table)
        if index < 2:
            assert hold(patient, 6) is None
        assert hold(busy, 1, start=5000) is None  # fits, but would starve the other
    assert hold(patient, 6) is not None


def test_who_runs_may_grow_into_what_others_wait_for():
    _, _, (busy, patient) = sharing(4)
    table = hold(busy, 3)
    assert table is not None
    assert hold(patient, 2) is None
    assert busy.extend([table])
    assert len(table.block_ids) == 4


def test_a_claim_that_is_withdrawn_holds_nobody_back():
    budget, _, (busy, patient) = sharing(4)
    assert hold(busy, 3) is not None
    assert hold(patient, 2) is None
    assert hold(busy, 1, start=900) is None
    budget.withdraw(patient)
    assert hold(busy, 1, start=900) is not None


def test_quotas_hold_within_a_shared_pool():
    _, free, (first, second) = sharing(10)
    second.set_quota(3)
    assert hold(second, 4) is None
    table = hold(second, 3)
    assert table is not None
    assert hold(first, 7) is not None
    second.set_quota(1)
    assert second.num_available == -2
    assert not second.extend([table])
    second.release(table)
    assert second.num_available == 1
    assert joint_free_list_is_exact(10, free, [first, second])


def test_a_smaller_budget_takes_nothing_away():
    budget, _, (first, second) = sharing(10)
    table = hold(first, 6)
    assert table is not None
    budget.resize(4)
    assert (first.pool.quota_blocks, second.pool.quota_blocks) == (4, 4)
    assert hold(second, 1) is None
    first.release(table)
    assert hold(second, 4) is not None
    budget.resize(10)
    assert first.pool.quota_blocks == 10
    assert hold(first, 6) is not None


def test_an_unloaded_model_leaves_nothing_behind():
    budget, free, (first, second) = sharing(8)
    table = hold(first, 4)
    assert table is not None
    end(first, table)
    session = first.sessions.begin("chat", "turn", first.root("", ""), 0.0)
    got = first.allocate(first.new_table(), tokens(BLOCK, 50), session=session)
    assert got is not None
    first.sessions.end_turn(session, tokens(BLOCK, 50), BLOCK, got[0], BLOCK, 1.0)
    assert first.close() == 0
    assert budget.free_bytes == 8
    assert len(free) == 8
    assert hold(second, 8) is not None


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 3, 2)])
@settings(max_examples=60)
@given(
    actions=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["allocate", "extend", "end", "turn", "quota", "budget"]),
            st.integers(1, 9),
        ),
        max_size=60,
    )
)
def test_every_block_is_somewhere_whatever_happens(sizes, actions):
    total = 12
    budget = KvBudget(total)
    is_shared = set(sizes) == {1}
    free = free_list(total) if is_shared else None
    caches = [
        CacheManager(total // size, BLOCK, free=free, budgets=[budget], block_bytes=size, session_ttl_s=1e9)
        for size in sizes
    ]
    held: list[list[tuple[BlockTable, int]]] = [[] for _ in sizes]
    limit = total
    for step, (model, action, number) in enumerate(actions):
        cache = caches[model]
        before = budget.free_bytes
        if action == "allocate" and (table := hold(cache, number, start=37 * (step % 5))) is not None:
            held[model].append((table, 37 * (step % 5)))
        elif action == "extend" and held[model]:
            cache.extend([held[model][number % len(held[model])][0]])
        elif action == "end" and held[model]:
            table, start = held[model].pop(number % len(held[model]))
            end(cache, table, start)
        elif action == "turn":
            session = cache.sessions.begin(f"s{number}", f"r{step}", cache.root("", ""), step)
            got = cache.allocate(cache.new_table(), tokens(number * BLOCK, 1000 * step), session=session)
            if got is None:
                cache.sessions.cancel(session, step)
            else:
                num_tokens = len(got[0].block_ids) * BLOCK
                cache.sessions.end_turn(session, tokens(num_tokens, 1000 * step), BLOCK, got[0], num_tokens, step)
        elif action == "quota":
            cache.set_quota(1 + number % cache.pool.num_blocks)
        elif action == "budget":
            limit = total - number // 2
            budget.resize(limit)
        budget.check_invariants()
        for each, tables in zip(caches, held, strict=True):
            each.check_invariants([table for table, _ in tables])
        # More may be held than a budget that has shrunk allows, but then nothing is added to it.
        assert budget.free_bytes >= 0 or budget.free_bytes >= before or action == "budget"
        if free is not None:
            assert joint_free_list_is_exact(total, free, caches)
    for cache, tables in zip(caches, held, strict=True):
        for table, start in tables:
            end(cache, table, start)
        assert cache.close() == 0
    assert budget.free_bytes == limit
